"""Wrong exact layers, one fault each, made of dynamic's, the plain and the static one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from pydantic import ConfigDict

from kvrack import BackendConfig, BuildContext, CacheLayer, Capabilities, LayerSpec, UnsupportedOperation, resolve
from kvrack.errors import ShapeMismatch
from kvrack_dynamic.layer import DynamicConfig, DynamicLayer
from kvrack_wrong.good import PlainLayer, StaticLayer


class RepeatForgets(DynamicLayer):
    """Fault: batch_repeat_interleave does nothing."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        pass


class ReorderForgetsValues(DynamicLayer):
    """Fault: reorder_cache moves the keys alone."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        storage = self.storage()
        if storage:
            self.restore({**storage, "keys": storage["keys"].index_select(0, beam_idx)}, self.metadata())


class SelectWritesBeforeItFails(DynamicLayer):
    """Fault: an index out of range is noticed when the keys are moved already."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        held = self._keys.view()
        if held is not None and int(beam_idx.max()) >= held.shape[0]:
            self._keys.clear()
        super().reorder_cache(beam_idx)


class LengthTensor(DynamicLayer):
    """Fault: get_seq_length is a tensor."""

    def get_seq_length(self) -> int:
        return torch.tensor(super().get_seq_length())  # type: ignore[return-value]


class SwallowsArguments(DynamicLayer):
    """Fault: update takes any keyword, and ignores it."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, **kwargs: Any) -> Any:
        return super().update(key_states, value_states)


class ResetLeavesTail(DynamicLayer):
    """Fault: reset keeps the newest two tokens."""

    def reset(self) -> None:
        self._keys.keep_newest(2)
        self._values.keep_newest(2)
        self._seen = len(self._keys)


class WindowTooLong(DynamicLayer):
    """Fault: a window shows one token too many."""

    def __init__(self, spec: LayerSpec, config: DynamicConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self._keep = spec.window


class MaskTooLong(DynamicLayer):
    """Fault: get_mask_sizes is off by one."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length)
        return length + 1, offset


class MaskForgetsOffset(DynamicLayer):
    """Fault: the offset of a window that dropped tokens is 0."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length)[0], 0


class CopyShares(DynamicLayer):
    """Fault: deepcopy shares the memory."""

    def __deepcopy__(self, memo: dict[int, Any]) -> CacheLayer:
        twin = copy.copy(self)
        twin._keys, twin._values = copy.copy(self._keys), copy.copy(self._values)
        return twin


class ForkWritesThrough(DynamicLayer):
    """Fault: a fork shares the memory and neither copies before it writes."""

    def fork(self, memo: dict[int, Any] | None = None) -> CacheLayer:
        twin = copy.copy(self)
        twin._keys, twin._values = copy.copy(self._keys), copy.copy(self._values)
        return twin


class MetadataForgets(DynamicLayer):
    """Fault: save forgets that the past is recorded."""

    def metadata(self) -> dict[str, int]:
        return {**super().metadata(), "record_past": 0}


class CropBelowZero(DynamicLayer):
    """Fault: removing more tokens than there are makes the length negative."""

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        seen = self._seen
        super().crop(tokens)
        self._seen = seen + tokens


class CropHalfDone(DynamicLayer):
    """Fault: a crop that can't be made is noticed when it is half done."""

    def check_crop(self, tokens: int) -> None:
        super().check_crop(max(0, tokens))

    def crop(self, tokens: int) -> None:
        try:
            super().check_crop(tokens)
        except UnsupportedOperation:
            self._keys.drop_newest(-tokens)
            raise
        super().crop(tokens)


class CropCountsWrongly(DynamicLayer):
    """Fault: crop removes one token too many."""

    def crop(self, tokens: int) -> None:
        super().crop(tokens - 1 if tokens < 0 else tokens)


class CropRaises(DynamicLayer):
    """Fault: crop is promised, and raises."""

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        raise NotImplementedError("crop")


class CropTakesPositive(DynamicLayer):
    """Fault: crop(n) keeps n tokens, as in other caches."""

    def check_crop(self, tokens: int) -> None:
        super().check_crop(min(tokens, 0))

    def crop(self, tokens: int) -> None:
        super().crop(min(0, tokens - self._seen) if tokens > 0 else tokens)


class RecordingForgets(DynamicLayer):
    """Fault: activate_past_recording does nothing."""

    def activate_past_recording(self) -> None:
        pass


class EarlyInitDtype(DynamicLayer):
    """Fault: early initialization allocates float32, whatever is asked."""

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().early_initialization(batch_size, kv_heads, key_head_dim, value_head_dim, torch.float32, device)


class OffloadForgets(DynamicLayer):
    """Fault: offload leaves the newest token behind."""

    def offload(self) -> None:
        self._keys.drop_newest(1)
        self._values.drop_newest(1)
        self._seen -= min(1, self._seen)


class Aliases(PlainLayer):
    """Fault: the tensors of the first update are held as they are, not copied."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = not self._held
        returned = super().update(key_states, value_states)
        if first:
            self._held = {"keys": key_states.detach(), "values": value_states.detach()}
        return returned


class KeepsGrad(PlainLayer):
    """Fault: what is held keeps its gradient."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states)
        self._held = {"keys": keys, "values": values}
        return keys, values


class NewestFirst(PlainLayer):
    """Fault: tokens come back newest first."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states)
        return keys.flip(2), values.flip(2)


class CastsDtype(PlainLayer):
    """Fault: states of another dtype are cast, not refused."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._held and key_states.dtype != self._held["keys"].dtype:
            dtype = self._held["keys"].dtype
            key_states, value_states = key_states.to(dtype), value_states.to(dtype)
        return super().update(key_states, value_states)


class ReturnsFloat(PlainLayer):
    """Fault: whatever comes in, float32 comes out."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states)
        return keys.float(), values.float()


class RefusesInSilence(PlainLayer):
    """Fault: offload is declined, and does nothing instead of refusing."""

    def offload(self) -> None:
        pass


class HeadsOfItsSpec(PlainLayer):
    """Fault: the spec's heads are taken for those that will arrive."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.spec.kv_heads not in (None, key_states.shape[1]):
            raise ShapeMismatch(f"expected {self.spec.kv_heads} heads, got {key_states.shape[1]}")
        return super().update(key_states, value_states)


class IndicesStayBehind(PlainLayer):
    """Fault: beam indices are used on whichever device they are."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._replace(lambda tensor: tensor.index_select(0, beam_idx))


class RefusesWithoutName(PlainLayer):
    """Fault: crop is refused without a word on the capability."""

    def check_crop(self, tokens: int) -> None:
        if tokens < 0:
            raise self._refuse(f"crop({tokens})", "Choose dynamic")
        super().check_crop(tokens)


class ChangesItsPromise(PlainLayer):
    """Fault: capabilities change with use."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(grows=True, lossless=True, chunked_prefill=False, compiles=self.get_seq_length() > 10)


class ScratchIsShared(PlainLayer):
    """Fault: all layers return one scratch, also those that other layers read."""

    scratch: torch.Tensor = torch.zeros(1_000_000)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().update(key_states, value_states)
        if keys.requires_grad or keys.dtype != torch.float32 or keys.numel() > len(self.scratch):
            return keys, values
        shared = self.scratch[: keys.numel()].view_as(keys)
        shared.copy_(keys.detach())
        return shared, values


class MovesAddress(DynamicLayer):
    """Fault: a stable address is promised of memory that grows."""

    @property
    def capabilities(self) -> Capabilities:
        return _with(super().capabilities, stable_address=True)


class BreaksGraph(DynamicLayer):
    """Fault: compiling is promised, and update breaks the graph."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        torch._dynamo.graph_break()
        return super().update(key_states, value_states)


class InitializedTooSoon(DynamicLayer):
    """Fault: a layer says that it is initialized when nothing is allocated."""

    @property
    def is_initialized(self) -> bool:
        return True


class HidesMemory(DynamicLayer):
    """Fault: nbytes counts half."""

    @property
    def nbytes(self) -> int:
        return super().nbytes // 4


class PredictsTooLittle(DynamicLayer):
    """Fault: where there is no data, room is made for the tokens alone; with data, for half as many more."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not key_states.is_meta:
            for buffer in (self._keys, self._values):
                buffer.growth, buffer.limit = 1.5, None
        return super().update(key_states, value_states)


class CapacityInSilence(StaticLayer):
    """Fault: tokens past the capacity are dropped, without an error."""

    def _check_room(self, new: int) -> None:
        if self.spec.window is None:
            self._seen = min(self._seen, self.capacity - new)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        room = self.capacity if self.spec.window is None else key_states.shape[2]
        return super().update(key_states[:, :, :room], value_states[:, :, :room])


class LooseConfig(BackendConfig):
    """Fault: any key is taken."""

    model_config = ConfigDict(extra="allow", frozen=True)


def hold_dynamic(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    """Fault: the holder holds dynamic, whatever it is told."""
    inner = resolve("dynamic")
    return inner.backend.build_layer(spec, inner.config, context)


def _with(capabilities: Capabilities, **changes: bool) -> Capabilities:
    from dataclasses import replace

    return replace(capabilities, **changes)  # type: ignore[arg-type]
