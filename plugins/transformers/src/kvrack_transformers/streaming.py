"""Streamer: an answer's words on stdout as the model makes them, and how fast it did."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
from transformers import TextStreamer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class Streamer(TextStreamer):
    """Writes text to stdout word by word, a newline at its end, and notes the time of every token.

    Attributes:
        prompt_tokens: tokens of the sequence that came before the first new one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.prompt_tokens = 0
        self._times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if self.next_tokens_are_prompt:
            self.prompt_tokens = value.shape[-1]
        else:
            self._times.append(time.perf_counter())
        super().put(value)  # type: ignore[no-untyped-call]

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        click.echo(text, nl=stream_end)

    @property
    def rate(self) -> float | None:
        """Tokens a second after the first, None with fewer than two."""
        if len(self._times) < 2:
            return None
        return (len(self._times) - 1) / (self._times[-1] - self._times[0])
