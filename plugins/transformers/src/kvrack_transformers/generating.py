"""kt.generate: model.generate, with what a cache is good for besides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import kvrack
from kvrack_transformers.enabling import disable, enable, is_enabled
from kvrack_transformers.fallback import Choice, first_that_fits
from kvrack_transformers.prefix import generate_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    cache_implementation: str | None = None,
    cache_config: Mapping[str, Any] | None = None,
    fallback: Sequence[Choice] = (),
    prefix_store: kvrack.PrefixStore | None = None,
    **settings: Any,
) -> Any:
    """Return what ``model.generate`` returns, from the first of several caches that has the memory for it.

    Where it falls back, a streamer meets its tokens once more, and sampling goes on from the random
    state there is.

    Args:
        model: the model.
        inputs: as of ``model.generate``.
        cache_implementation: a backend's name; None for what generate does by itself.
        cache_config: its config.
        fallback: what to try in order where that runs out of memory, each a name or ``(name, config)``.
        prefix_store: where the prompt's known beginning comes from, and what was computed goes.
        **settings: everything else that ``model.generate`` takes; it refuses what it doesn't know.

    Raises what ``model.generate`` raises, and what `first_that_fits` says of fallbacks.
    """

    def attempt(own: dict[str, Any]) -> Any:
        return generate_once(model, inputs, {**own, **settings}, prefix_store)

    was_enabled = is_enabled()
    enable()
    try:
        return first_that_fits(attempt, (cache_implementation, cache_config), fallback, settings)
    finally:
        if not was_enabled:
            disable()
