"""TransformersEncoderDecoderCache: a kvrack cache that transformers takes for one of its encoder-decoder caches."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import EncoderDecoderCache

import kvrack
from kvrack_transformers.cache import TransformersCache
from kvrack_transformers.gathering import Gathered, rebuilt
from kvrack_transformers.owning import OwnsRack

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class CrossAttentionCache(TransformersCache):
    """The cross-attention layers, as models read and fill them.

    T5Gemma's `generate` makes this cache anew from its class and a config, to be rid of the decoder's
    windows. kvrack's has none, so what is made so holds nothing and stands for the one it replaces.

    Args:
        rack: the kvrack cache of these layers; None where generate makes one.
        config: unused; what generate gives.
        offloading: unused; what generate gives.
    """

    def __init__(
        self, rack: kvrack.Cache | None = None, config: PreTrainedConfig | None = None, offloading: bool = False
    ) -> None:
        self.is_stand_in = rack is None
        if rack is not None:
            super().__init__(rack)


class TransformersEncoderDecoderCache(OwnsRack, EncoderDecoderCache):  # type: ignore[misc]
    """A kvrack cache as `transformers.EncoderDecoderCache`, to pass as ``past_key_values=`` (or ``cache=``).

    It derives from transformers' class because models ask `isinstance`. What it holds is kvrack's.

    Args:
        rack: the kvrack cache, or what it is rebuilt from; see `TransformersCache`.

    Attributes:
        rack: the kvrack cache, the decoder's own layers and those of cross-attention together.
        self_attention_cache: the decoder's own layers.
        is_updated: for each layer whether the encoder's output is held; models set and read it.
    """

    def __init__(self, rack: kvrack.Cache | Gathered) -> None:
        self.rack = rack if isinstance(rack, kvrack.Cache) else rebuilt(rack)
        self._cross_attention_cache = CrossAttentionCache(self.rack.cross_attention)
        super().__init__(TransformersCache(self.rack.self_attention), self._cross_attention_cache)

    def __repr__(self) -> str:
        return f"TransformersEncoderDecoder{self.rack!r}"

    @property  # type: ignore[override]
    def cross_attention_cache(self) -> CrossAttentionCache:
        """The cross-attention layers."""
        return self._cross_attention_cache

    @cross_attention_cache.setter
    def cross_attention_cache(self, cache: CrossAttentionCache) -> None:
        if not cache.is_stand_in:
            self._cross_attention_cache = cache

    # --- what generate does with it -------------------------------------------------------------

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.self_attention_cache.get_seq_length(layer_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens of the decoder; see `TransformersCache.crop`. Cross-attention stays."""
        self.self_attention_cache.crop(tokens_to_remove)

    def activate_past_recording(self) -> None:
        self.self_attention_cache.activate_past_recording()  # type: ignore[no-untyped-call]

    def is_recording_past(self, layer_idx: int) -> bool:
        return bool(self.self_attention_cache.is_recording_past(layer_idx))

    # --- what a user asks -----------------------------------------------------------------------

    def fork(self, tokens: int | None = None) -> TransformersEncoderDecoderCache:
        """Return an independent cache with the same state, or that of the decoder's first `tokens`; see
        `kvrack.Cache.fork`."""
        return TransformersEncoderDecoderCache(self.rack.fork(tokens))

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersEncoderDecoderCache:
        twin = memo[id(self)] = TransformersEncoderDecoderCache(copy.deepcopy(self.rack, memo))
        return twin


torch.utils._pytree.register_pytree_node(
    TransformersEncoderDecoderCache,
    lambda cache: ([cache.rack], None),
    lambda children, _: TransformersEncoderDecoderCache(*children),
    serialized_type_name="kvrack_transformers.TransformersEncoderDecoderCache",
    flatten_with_keys_fn=lambda cache: ([(torch.utils._pytree.GetAttrKey("rack"), cache.rack)], None),
)
