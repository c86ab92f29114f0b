"""generate from a beginning that is known: rows for beams out of a cache of one row, and prompts from a PrefixStore."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import kvrack
from kvrack_transformers.creating import AnyCache, create_cache, wrap
from kvrack_transformers.dispatched import input_device
from kvrack_transformers.enabling import note_cache
from kvrack_transformers.reading import model_spec
from kvrack_transformers.sharding import all_agree
from kvrack_transformers.versions import cache_argument, given_caches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("kvrack.transformers")

DEFAULT_BACKEND = "dynamic"
"""The backend of caches for a prefix store where nothing names one."""

READABLE = {"input_ids", "attention_mask"}
"""Tensors that a prompt may consist of for its tokens to say everything about it."""


def generate_once(
    model: PreTrainedModel,
    inputs: torch.Tensor | None,
    settings: Mapping[str, Any],
    prefix_store: kvrack.PrefixStore | None = None,
) -> Any:
    """Return what ``model.generate(inputs, **settings)`` returns, after the cache was made ready for it.

    A kvrack cache of one row that is given for several sequences (beams, `num_return_sequences`, or
    rows of a batch that all begin so) is forked and repeated: the one given stays as it is. With
    `prefix_store` the prompt's known beginning comes from there, and what was computed is put there.
    """
    prompt = _Prompt.read(model, inputs, settings)
    names = given_caches(settings)
    given = settings[names[0]] if names else None
    if given is None and prefix_store is not None and prompt is not None and prompt.is_plain:
        return _generate_from(prefix_store, model, inputs, settings, prompt)
    if prompt is not None and isinstance(given, AnyCache):
        settings = {**settings, **dict.fromkeys(names, expanded(given, prompt.sequences))}
    return model.generate(inputs, **settings)  # type: ignore[operator]


def expanded(cache: AnyCache, rows: int) -> AnyCache:
    """Return `cache` where it is empty or has `rows` rows, else a fork of it with each row repeated to get so many.

    One whose rows don't divide `rows` is returned as it is, for the model to refuse.
    """
    held = cache.rack.batch_size
    if held < 1 or held == rows or rows % held:
        return cache
    fork = cache.fork()
    fork.batch_repeat_interleave(rows // held)
    return fork


@dataclass(frozen=True)
class _Prompt:
    """What is to be generated from.

    Attributes:
        ids: ``[rows, tokens]``.
        copies: sequences that are made of each row, beams included.
        is_plain: whether its tokens say all there is: no padding, no images, a decoder that attends, and a
            cache wanted.
    """

    ids: torch.Tensor
    copies: int
    is_plain: bool

    @classmethod
    def read(cls, model: PreTrainedModel, inputs: torch.Tensor | None, settings: Mapping[str, Any]) -> _Prompt | None:
        """Return the prompt, None where there are no tokens to start from."""
        ids = inputs if inputs is not None else settings.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return None
        counts = (setting(model, settings, name) or 1 for name in ("num_beams", "num_return_sequences"))
        mask = settings.get("attention_mask")
        tensors = {name for name, value in settings.items() if isinstance(value, torch.Tensor)}
        is_plain = (
            not ids.is_floating_point()
            and any(layer.attention is not None for layer in model_spec(model).layers)
            and not getattr(model.config, "is_encoder_decoder", False)
            and setting(model, settings, "use_cache") is not False
            and tensors <= READABLE
            and (mask is None or bool(mask.all()))
        )
        return cls(ids, max(counts), is_plain)

    @property
    def sequences(self) -> int:
        """Rows that the cache must have."""
        return self.ids.shape[0] * self.copies

    @property
    def common(self) -> list[int]:
        """The tokens that all rows begin with, without a last one, which is left to get logits from."""
        most = self.ids.shape[1] - 1
        differs = (self.ids != self.ids[:1]).any(dim=0)[:most].nonzero()
        return self.ids[0, : int(differs[0]) if len(differs) else most].tolist()


def setting(model: PreTrainedModel, settings: Mapping[str, Any], name: str) -> Any:
    """Return what `generate` goes by: its keyword, else its generation config's, else the model's."""
    places = (settings.get("generation_config"), getattr(model, "generation_config", None))
    values = (settings.get(name), *(getattr(place, name, None) for place in places))
    return next((value for value in values if value is not None), None)


def _generate_from(
    store: kvrack.PrefixStore,
    model: PreTrainedModel,
    inputs: torch.Tensor | None,
    settings: Mapping[str, Any],
    prompt: _Prompt,
) -> Any:
    needed = _tokens_needed(model, settings, prompt)
    name = setting(model, settings, "cache_implementation") or DEFAULT_BACKEND
    config = dict(setting(model, settings, "cache_config") or {})
    fresh = create_cache(model, name, max_length=needed, **config).rack
    has_states = any(layer.spec.states for layer in fresh.layers)
    common = prompt.common
    found, length = store.get(common, like=fresh, room=needed)
    # Where prompts part that could not be branched, as past a window, the next one finds a cache of the right length;
    # for several sequences the beginning is computed once; and states are fed with care, which `prefill` does.
    stop = len(common) if prompt.sequences > 1 or has_states else store.shared_length(common, like=fresh)
    if not all_agree(model, (length, stop)):
        # Ranks compute each token together, and one of their stores may have lost a file.
        logger.warning("the ranks' prefix stores differ: the prompt is computed from its first token in each")
        found, length, stop = None, 0, len(common)
    rack = found or fresh
    if stop > length:
        prefill(model, wrap(rack), common[length:stop])
        store.put(common[:stop], rack)
    cache = expanded(wrap(rack), prompt.sequences)
    note_cache(cache)
    own = {cache_argument(model): cache, "cache_implementation": None, "cache_config": None}
    output = model.generate(inputs, **{**settings, **own})  # type: ignore[operator]
    if prompt.sequences == 1:
        sequence = output if isinstance(output, torch.Tensor) else output.sequences
        store.put(sequence[0, : cache.rack.get_seq_length()].tolist(), cache.rack)
    return output


def _tokens_needed(model: PreTrainedModel, settings: Mapping[str, Any], prompt: _Prompt) -> int:
    """Return how many tokens prompt and answer have together at most."""
    tokens, new = prompt.ids.shape[1], setting(model, settings, "max_new_tokens")
    if new is not None:
        return tokens + int(new)
    longest = setting(model, settings, "max_length")
    # 20 new tokens are what generate makes where nothing else is said.
    return max(tokens + 1, int(longest)) if longest is not None else tokens + 20


def prefill(model: PreTrainedModel, cache: AnyCache, token_ids: Sequence[int]) -> None:
    """Feed the tokens of one sequence to `model`, for `cache` to go on from there.

    Models with states get them one by one once the cache has seen some: given several, some of them
    (Mamba, Jamba) start their states anew, as transformers has them.

    Args:
        model: the model.
        cache: of one row, or empty.
        token_ids: the tokens after those that `cache` has seen.
    """
    taken = inspect.signature(model.forward).parameters
    has_states = any(layer.spec.states for layer in cache.rack.layers)
    remaining = list(token_ids)
    device = input_device(model)
    while remaining:
        seen = cache.get_seq_length()
        count = 1 if has_states and seen else len(remaining)
        ids = torch.tensor([remaining[:count]], device=device)
        extra: dict[str, Any] = {
            # Logits of thousands of tokens would take more memory than the cache.
            "logits_to_keep": 1,
            # Some models count from 0 again where they aren't told.
            "position_ids": torch.arange(seen, seen + count, device=device)[None],
            "attention_mask": torch.ones((1, seen + count), dtype=torch.long, device=device),
        }
        known = {name: value for name, value in extra.items() if name in taken}
        with torch.no_grad():
            model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **known)
        remaining = remaining[count:]
