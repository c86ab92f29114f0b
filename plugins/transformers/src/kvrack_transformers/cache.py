"""TransformersCache: a kvrack cache that transformers takes for one of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache as HFCache

import kvrack
from kvrack.layer import CacheLayer, EmptyLayer, StateLayer
from kvrack_transformers import versions
from kvrack_transformers.gathering import Gathered, rebuilt
from kvrack_transformers.layer_states import LayerStates
from kvrack_transformers.owning import OwnsRack


class TransformersCache(OwnsRack, HFCache):  # type: ignore[misc]
    """A kvrack cache as `transformers.Cache`, to pass as ``past_key_values=`` (or ``cache=``).

    It derives from transformers' class because models and masks ask `isinstance`; none of that
    class's state is used. Everything is answered by the kvrack cache it owns.

    Args:
        rack: the kvrack cache; or what iterating over such a cache yields, joined row by row, from which
            `torch.nn.DataParallel` rebuilds it; see `kvrack_transformers.gathering`.

    Attributes:
        rack: the kvrack cache.
    """

    def __init__(self, rack: kvrack.Cache | Gathered) -> None:
        self.rack = rack if isinstance(rack, kvrack.Cache) else rebuilt(rack)

    def __repr__(self) -> str:
        return f"Transformers{self.rack!r}"

    # --- what models and masks ask --------------------------------------------------------------

    @property
    def layers(self) -> list[CacheLayer | LayerStates]:  # type: ignore[override]
        """The kvrack layers, in order; for releases whose models read states there, as those read them."""
        if versions.READS_STATES_FROM_LAYERS:
            return [LayerStates(layer) if isinstance(layer, StateLayer) else layer for layer in self.rack.layers]
        return self.rack.layers  # type: ignore[return-value]

    def __len__(self) -> int:
        return len(self.rack)

    def __iter__(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]]:
        """Yield keys, values and window of each layer, as transformers' own caches do."""
        for layer in self.rack.layers:
            window = layer.spec.window
            yield (
                getattr(layer, "keys", None),
                getattr(layer, "values", None),
                None if window is None else torch.tensor(window),
            )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Remember new tokens and return what attention must see; see `kvrack.AttentionLayer.update`.

        `cache_kwargs` (rotary tables and positions, in early releases) and `kwargs` (the model's own
        keywords, in late ones) say nothing that a kvrack layer needs.
        """
        return self.rack.update(key_states, value_states, layer_idx)

    def update_conv_state(  # type: ignore[override]
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> torch.Tensor:
        """Take in new convolution inputs and return what the convolution needs; see `kvrack.StateLayer`."""
        returned = self.rack.update_conv_state(conv_states, layer_idx, state_idx, conv_kernel_size)
        if versions.RETURNS_WHOLE_CONV_STATE:
            return returned
        state = self.rack.get_conv_state(layer_idx, state_idx)
        assert state is not None
        return state

    def update_recurrent_state(  # type: ignore[override]
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        return self.rack.update_recurrent_state(recurrent_states, layer_idx, state_idx)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.rack.get_conv_state(layer_idx, state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.rack.get_recurrent_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self.rack.has_previous_state(layer_idx, state_idx)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.rack.get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.rack.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self.rack.get_mask_sizes(query_length, layer_idx)

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.rack.get_max_length(layer_idx)

    @property
    def is_compileable(self) -> bool:
        return self.rack.is_compileable

    @property
    def is_sliding(self) -> list[bool]:
        return self.rack.is_sliding

    @property
    def is_linear(self) -> list[bool]:
        return [layer.spec.attention is None and layer.spec.states > 0 for layer in self.rack.layers]

    @property
    def is_dummy(self) -> list[bool]:
        return [isinstance(layer, EmptyLayer) for layer in self.rack.layers]

    def is_recording_past(self, layer_idx: int) -> bool:
        return bool(getattr(self.rack.layers[layer_idx], "record_past", False))

    # --- what generate does with it -------------------------------------------------------------

    def reset(self) -> None:
        self.rack.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest ``-tokens_to_remove`` tokens; in releases whose own crop takes the length to
        keep, a positive number is that."""
        tokens = versions.tokens_to_crop(tokens_to_remove, self.rack.get_seq_length())
        states = [layer for layer in self.rack.layers if isinstance(layer, StateLayer) and layer.is_initialized]
        if tokens and states and (hidden := versions.states_are_hidden(tokens)):
            raise kvrack.UnsupportedOperation(
                self.rack.name,
                hidden,
                "Its models don't say what happens to them: upgrade transformers, or call reset() and start anew",
            )
        self.rack.crop(tokens)

    def activate_past_recording(self) -> None:
        """From now on keep what a later `crop` needs; states are left out, and so refuse to be cropped, in
        releases whose models don't say all that happens to them."""
        for layer in self.rack.layers:
            if versions.RECORDS_STATES or not isinstance(layer, StateLayer):
                layer.activate_past_recording()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.rack.reorder_cache(beam_idx)

    def offload(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        if not (only_non_sliding and self.rack.layers[layer_idx].is_sliding):
            self.rack.offload(layer_idx)

    def prefetch(self, layer_idx: int, only_non_sliding: bool = True) -> None:
        if not (only_non_sliding and self.rack.layers[layer_idx].is_sliding):
            self.rack.prefetch(layer_idx)

    # --- what a user asks -----------------------------------------------------------------------

    def fork(self, tokens: int | None = None) -> TransformersCache:
        """Return an independent cache with the same state, or that of its first `tokens`; see `kvrack.Cache.fork`."""
        return TransformersCache(self.rack.fork(tokens))


torch.utils._pytree.register_pytree_node(
    TransformersCache,
    lambda cache: ([cache.rack], None),
    lambda children, _: TransformersCache(*children),
    serialized_type_name="kvrack_transformers.TransformersCache",
    flatten_with_keys_fn=lambda cache: ([(torch.utils._pytree.GetAttrKey("rack"), cache.rack)], None),
)
