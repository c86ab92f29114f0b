"""kt.generate: model.generate, with what a cache is good for besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import kvrack
from kvrack_transformers.enabling import disable, enable, is_enabled
from kvrack_transformers.prefix import generate_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    cache_implementation: str | None = None,
    cache_config: Mapping[str, Any] | None = None,
    prefix_store: kvrack.PrefixStore | None = None,
    **settings: Any,
) -> Any:
    """Return what ``model.generate`` returns.

    Args:
        model: the model.
        inputs: as of ``model.generate``.
        cache_implementation: a backend's name; None for what generate does by itself.
        cache_config: its config.
        prefix_store: where the prompt's known beginning comes from, and what was computed goes.
        **settings: everything else that ``model.generate`` takes.
    """
    own: dict[str, Any] = {}
    if cache_implementation is not None:
        own = {"cache_implementation": cache_implementation, "cache_config": dict(cache_config or {})}
    was_enabled = is_enabled()
    enable()
    try:
        return generate_once(model, inputs, {**own, **settings}, prefix_store)
    finally:
        if not was_enabled:
            disable()
