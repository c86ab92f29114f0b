"""Chat: a conversation whose cache is kept over its turns, so that each turn feeds the model what is new."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import kvrack
from kvrack.errors import SnapshotError
from kvrack.layer import AttentionLayer
from kvrack_transformers.creating import AnyCache, create_cache, load
from kvrack_transformers.dispatched import input_device
from kvrack_transformers.identity import fingerprint
from kvrack_transformers.prefix import prefill
from kvrack_transformers.reading import model_spec, room_for_answer
from kvrack_transformers.versions import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer

MESSAGES = "messages"
"""Under which name a saved conversation keeps its messages."""

CHECKPOINTS = 8
"""Turns that can be gone back to where layers drop what has left their window, or keep states."""


@dataclass(frozen=True)
class Turn:
    """What one answer took.

    Attributes:
        known: tokens of the conversation that the cache had seen.
        fed: tokens that were fed before the first one of the answer.
        rolled_back: tokens that the cache had seen and that are no longer part of the conversation, since
            the template wrote its history otherwise, or after an undo.
        new: tokens of the answer.
    """

    known: int
    fed: int
    rolled_back: int
    new: int


class Chat:
    """A conversation with a model, over one cache.

    At each turn the whole conversation is written by the chat template and compared with what the
    cache has seen, token by token. So a template that rewrites history (strips thinking, trims an
    answer) is met: the cache goes back to the last common token, and what follows is fed anew.
    Layers with windows or states can't go back to any token; there the end of an earlier prompt
    serves, or the conversation is fed from its start.

    Args:
        model: the model, a decoder.
        tokenizer: its tokenizer, with a chat template.
        cache: name of the backend.
        cache_config: its config.
        system: the system message; None for what the template does by itself.
        max_length: tokens that the conversation may get to; the model's own limit when None.
        max_new_tokens: longest answer.
        template_settings: what the chat template takes besides, such as ``{"enable_thinking": False}``.

    Attributes:
        messages: the conversation, as chat templates take it.
        turn: what the last answer took, None before the first.

    Raises ValueError for a tokenizer without a chat template, what `kt.create_cache` raises, and
    UnsupportedOperation for a model that keeps no keys and values, or has an encoder.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: str = "dynamic",
        cache_config: Mapping[str, Any] | None = None,
        *,
        system: str | None = None,
        max_length: int | None = None,
        max_new_tokens: int = 256,
        template_settings: Mapping[str, Any] | None = None,
    ) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("Chat: the tokenizer has no chat template. Set tokenizer.chat_template")
        self.model = model
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.template_settings = dict(template_settings or {})
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        self.turn: Turn | None = None
        longest = max_length if max_length is not None else model_spec(model).max_length
        self._cache: AnyCache = create_cache(model, cache, max_length=longest, **dict(cache_config or {}))
        self._take(self._cache, [])

    @property
    def cache(self) -> AnyCache:
        """The cache; the chat's own, to look at."""
        return self._cache

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the cache has seen."""
        return list(self._tokens)

    def send(self, text: str, streamer: BaseStreamer | None = None, **settings: Any) -> str:
        """Say `text` and return the model's answer.

        Args:
            text: the user's message.
            streamer: is given the answer's tokens as they are made.
            **settings: what else ``model.generate`` takes, such as ``do_sample=True``; passed on.

        Raises KvrackError when the conversation has grown longer than the model takes. Whatever
        is raised, the conversation is as it was before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        ids = self._written(asked, add_generation_prompt=True)
        longest = settings.pop("max_new_tokens", self.max_new_tokens)
        room = room_for_answer(self.model, len(ids), longest, self._cache.rack.get_max_length())
        try:
            known, rolled_back = self._go_back_to(ids[:-1])
            self._feed(ids[known:-1])
            answer = self._generate(ids, room, streamer, settings)
        except BaseException:
            # How far the cache got isn't known.
            self._restart()
            raise
        self.turn = Turn(known, len(ids) - known, rolled_back, len(answer))
        said = str(self.tokenizer.decode(answer, skip_special_tokens=True))
        self.messages = [*asked, {"role": "assistant", "content": said}]
        return said

    def undo(self) -> bool:
        """Take the last message of the user back, with the answer to it; return whether there was one."""
        asked = [index for index, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return False
        self.messages = self.messages[: asked[-1]]
        # Templates may refuse a conversation in which nobody has asked anything yet.
        if len(asked) == 1:
            self._restart()
        else:
            self._go_back_to(self._written(self.messages, add_generation_prompt=False))
        return True

    def save(self, path: str | Path) -> None:
        """Write the conversation and its cache to one file, for `load`. Raises what `kvrack.Cache.save` raises."""
        notes = {MESSAGES: json.dumps(self.messages)}
        self._cache.rack.save(path, fingerprint(self.model, self.tokenizer), self._tokens, notes)

    def load(self, path: str | Path) -> None:
        """Go on with a conversation that was saved, its cache's backend and config included.

        Raises what `kvrack.load` raises, above all for a file of another model, and SnapshotError for
        a cache without a conversation. The present conversation is kept then.
        """
        loaded = load(self.model, path, fingerprint(self.model, self.tokenizer))
        found = kvrack.describe(path, loaded.rack.model_spec.shard)
        if MESSAGES not in found.notes or found.token_ids is None:
            raise SnapshotError(f"{path} is a cache without a conversation. Load it with kvrack.load", fault="foreign")
        self._take(loaded, found.token_ids)
        self.messages, self.turn = json.loads(found.notes[MESSAGES]), None

    # --- what the cache has seen ----------------------------------------------------------------

    def _take(self, cache: AnyCache, tokens: list[int]) -> None:
        spec = cache.rack.model_spec
        if spec.is_encoder_decoder or not any(isinstance(layer, AttentionLayer) for layer in cache.rack.layers):
            raise kvrack.UnsupportedOperation(
                "Chat", "a model without self-attention, or with an encoder,", "Call model.generate turn by turn"
            )
        self._cache, self._tokens = cache, tokens
        goes_back = all(layer.spec.window is None and not layer.spec.states for layer in cache.rack.layers)
        self._keeps_checkpoints = not (goes_back and cache.rack.capabilities.crops)
        self._checkpoints: deque[tuple[int, AnyCache]] = deque(maxlen=CHECKPOINTS)

    def _written(self, messages: list[dict[str, str]], add_generation_prompt: bool) -> list[int]:
        tokenizer: Any = self.tokenizer
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=True, **self.template_settings
        )
        return [int(token) for token in encoded["input_ids"]]

    def _go_back_to(self, ids: list[int]) -> tuple[int, int]:
        """Leave in the cache what it has in common with `ids`; return how many tokens these are and how many went."""
        seen = len(self._tokens)
        common = next(
            (i for i, (a, b) in enumerate(zip(self._tokens, ids, strict=False)) if a != b), min(seen, len(ids))
        )
        if common < seen:
            try:
                self._cache.rack.crop(common - seen)
            except kvrack.UnsupportedOperation:
                common = self._go_back_to_checkpoint(common)
            self._tokens = self._tokens[:common]
        while self._checkpoints and self._checkpoints[-1][0] > common:
            self._checkpoints.pop()
        return common, seen - common

    def _go_back_to_checkpoint(self, most: int) -> int:
        """Make the cache that of the latest checkpoint of `most` tokens or fewer; return how many it has."""
        fitting = [(length, cache) for length, cache in self._checkpoints if length <= most]
        if not fitting:
            self._cache.rack.reset()
            return 0
        length, cache = fitting[-1]
        self._cache = cache.fork()
        return length

    def _restart(self) -> None:
        self._cache.rack.reset()
        self._tokens = []
        self._checkpoints.clear()

    def _feed(self, ids: list[int]) -> None:
        if ids:
            prefill(self.model, self._cache, ids)
            self._tokens = [*self._tokens, *ids]
        if self._keeps_checkpoints and self._tokens:
            self._checkpoints.append((len(self._tokens), self._cache.fork()))

    def _generate(
        self, ids: list[int], room: int, streamer: BaseStreamer | None, settings: Mapping[str, Any]
    ) -> list[int]:
        prompt = torch.tensor([ids], device=input_device(self.model))
        own = {
            cache_argument(self.model): self._cache,
            "cache_implementation": None,
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": room,
            "streamer": streamer,
            "return_dict_in_generate": False,
        }
        sequence: list[int] = self.model.generate(prompt, **{**settings, **own})[0].tolist()  # type: ignore[operator]
        self._tokens = sequence[: self._cache.rack.get_seq_length()]
        return sequence[len(ids) :]
