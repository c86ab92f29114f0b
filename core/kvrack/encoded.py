"""The attention layers of a backend that brings a codec instead of a layer, one for each layout."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrack.backend import Capabilities
from kvrack.buffer import TOKENS
from kvrack.buffered import BufferedLayer
from kvrack.codec import Codec, EncodedBuffer, Role
from kvrack.config import BackendConfig, LayoutConfig
from kvrack.context import BuildContext
from kvrack.encoded_slots import EncodedSlots
from kvrack.errors import CapacityExceeded
from kvrack.fixed import FixedTokens
from kvrack.model import LayerSpec
from kvrack.preallocated import PreallocatedLayer, missing_capacity

ROLES: tuple[Role, ...] = ("keys", "values")


def build_encoded(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> BufferedLayer | PreallocatedLayer:
    """Return a layer whose codes are kept as the config's `layout` says.

    With layout static, codecs that encode each token by itself get slots that are written in place;
    one that encodes blocks of several is kept in buffers that are allocated whole, since which
    tokens are exact then moves in steps that a graph can't follow.
    """
    if not (isinstance(config, LayoutConfig) and config.layout == "static"):
        return EncodedLayer(spec, config, context)
    codecs = [context.new_codec(config, role) for role in ROLES]
    if all(codec.block_tokens == 1 for codec in codecs):
        return SlotsLayer(spec, config, context)
    return BlocksLayer(spec, config, context)


class EncodedLayer(BufferedLayer):
    """Keys and values in two EncodedBuffers that grow, each with an instance of the context's codec.

    What a full, sliding or chunked layer does with tokens is BufferedLayer's; the bytes are the
    codec's. The tensors that `update` returns lie in the cache's scratch, or in the layer's own
    where other layers read them.

    Raises InvalidPlugin when the context has no codec.
    """

    _capacity: int | None = None
    """Tokens that memory is allocated for at once; None where it grows."""

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self._codecs = (context.new_codec(config, "keys"), context.new_codec(config, "values"))
        self._keys, self._values = (self._buffer(codec) for codec in self._codecs)

    def _buffer(self, codec: Codec) -> EncodedBuffer:
        context = self.context
        slot = _scratch_slot(self.spec, context, codec.role)
        return EncodedBuffer(
            codec,
            lambda rows: context.buffer(rows=rows, capacity=self._capacity),
            context.scratch,
            slot,
            context.backend,
            context.max_length if self._capacity is None else self._capacity,
            context.origin,
        )

    @property
    def capabilities(self) -> Capabilities:
        error = max(codec.relative_error for codec in self._codecs)
        return Capabilities(
            grows=True,
            slides=True,
            chunks=True,
            chunked_prefill=True,
            unequal_head_dim=True,
            crops=True,
            records_past=True,
            early_init=True,
            offloads=True,
            lossless=error == 0.0,
            relative_error=error,
        )


class BlocksLayer(EncodedLayer):
    """An EncodedLayer whose memory for codes is allocated once, for a capacity that is enforced.

    A windowed layer takes any number of tokens, as its window bounds what it holds. Returns exact
    lengths, as where memory grows; it is not made for torch.compile.

    Raises InvalidConfig when neither the config nor the context says how many tokens will come.
    """

    def __init__(self, spec: LayerSpec, config: LayoutConfig, context: BuildContext) -> None:
        capacity = config.max_cache_len if config.max_cache_len is not None else context.max_length
        self._capacity = capacity if spec.window is None else None
        super().__init__(spec, config, context)
        if spec.window is None and capacity is None:
            raise missing_capacity(context)

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, grows=self._capacity is None)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_room(key_states.shape[TOKENS] if key_states.dim() > TOKENS else 0)
        return super().update(key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        self._check_room(query_length)
        return super().get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1 if self._capacity is None else self._capacity

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        if self._capacity is not None and metadata["seen"] > self._capacity:
            raise CapacityExceeded(self._capacity, 0, metadata["seen"])
        super().restore(storage, metadata)

    def _check_room(self, new: int) -> None:
        if self._capacity is not None and self._seen + new > self._capacity:
            raise CapacityExceeded(self._capacity, self._seen, new)


class SlotsLayer(PreallocatedLayer):
    """Keys and values as codes in slots that are written in place, for codecs that encode each token by itself."""

    def __init__(self, spec: LayerSpec, config: LayoutConfig, context: BuildContext) -> None:
        self._codecs: dict[Role, Codec] = {role: context.new_codec(config, role) for role in ROLES}
        self._scratch_slots = {role: _scratch_slot(spec, context, role) for role in self._codecs}
        super().__init__(spec, config, context, capacity=config.max_cache_len)

    def _new_slots(self, role: Role, slots: int, is_ring: bool) -> FixedTokens:
        context, codec = self.context, self._codecs[role]
        return EncodedSlots(
            codec,
            slots,
            lambda: context.fixed_buffer(slots, is_ring),
            context.scratch,
            self._scratch_slots[role],
            context.backend,
            context.origin,
        )

    @property
    def capabilities(self) -> Capabilities:
        codecs = self._codecs.values()
        return self._promises(
            compiles=all(codec.compiles for codec in codecs),
            relative_error=max(codec.relative_error for codec in codecs),
        )


def _scratch_slot(spec: LayerSpec, context: BuildContext, role: Role) -> str:
    """Return the scratch's slot that a layer decodes into: its own where other layers read what it returned."""
    return context.scratch.own_slot(role) if spec.read_by_others else role
