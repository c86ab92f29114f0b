"""Good backends of several kinds: they prove that the suite asks no more than the contract."""

from __future__ import annotations

import torch

from kvrack import AttentionLayer, BackendConfig, BuildContext, CacheLayer, Capabilities, LayerSpec, resolve
from kvrack.buffered import check_pair
from kvrack.errors import CapacityExceeded, ShapeMismatch
from kvrack.layer import refuse_positive


class PlainLayer(AttentionLayer):
    """Concatenation, and nothing that can be declined."""

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        if spec.window is not None:
            promise = "slides" if spec.attention == "sliding" else "chunks"
            raise self._refuse(f"a {spec.attention} layer [{promise}]", "Choose dynamic")
        self._held: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(grows=True, lossless=True)

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._check(key_states, value_states)
        if self._held and key_states.shape[2] > 1:
            raise self._refuse("an update of several tokens [chunked_prefill]", "Give them one by one")
        if key_states.shape[3] != value_states.shape[3]:
            raise self._refuse("head_dims that differ [unequal_head_dim]", "Choose dynamic")
        returned = []
        for name, states in (("keys", key_states), ("values", value_states)):
            past = [self._held[name]] if name in self._held else []
            returned.append(torch.cat([*past, states], dim=2))
            self._held[name] = torch.cat([*past, states.detach()], dim=2)
        return returned[0], returned[1]

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        for name, states in (("keys", key_states), ("values", value_states)):
            check_states(states, self._held.get(name), name)
        check_pair(key_states, value_states)

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        raise self._refuse("early_initialization [early_init]", "Leave it out: the first update allocates")

    def get_seq_length(self) -> int:
        return self._held["keys"].shape[2] if self._held else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def activate_past_recording(self) -> None:
        raise self._refuse("activate_past_recording [records_past]", "Choose dynamic")

    def offload(self) -> None:
        raise self._refuse("offload [offloads]", "Choose dynamic")

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        if tokens:
            raise self._refuse(f"crop({tokens}) [crops]", "Call reset() and start anew")

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)

    def reset(self) -> None:
        self._held = {}

    def storage(self) -> dict[str, torch.Tensor]:
        return dict(self._held)

    def metadata(self) -> dict[str, int]:
        return {}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self._held = {name: tensor.detach().clone() for name, tensor in storage.items()}


def check_states(states: torch.Tensor, held: torch.Tensor | None, name: str) -> None:
    """Raise ShapeMismatch unless `states` can follow what is held."""
    if states.dim() != 4:
        raise ShapeMismatch(f"{name}: expected 4 dimensions, got {tuple(states.shape)}")
    if held is None:
        return
    given, kept = ((*each.shape[:2], each.shape[3], each.dtype) for each in (states, held))
    if given != kept:
        raise ShapeMismatch(f"{name}: expected batch, heads, head_dim and dtype {kept}, got {given}. Call reset()")


class StaticLayer(AttentionLayer):
    """Preallocated slots, returned whole; a full sliding window is a ring."""

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        if spec.attention == "chunked":
            raise self._refuse("a chunked layer [chunks]", "Choose dynamic")
        self.capacity = spec.window or context.max_length or 512
        self._seen = self._held = 0
        self._slots: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            slides=True, chunked_prefill=True, unequal_head_dim=True, crops=True, early_init=True, offloads=True,
            compiles=True, stable_address=True, lossless=True, grows=self.spec.window is not None,
        )  # fmt: skip

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def is_croppable(self) -> bool:
        return self.spec.window is None or self._goes_back(1)

    def _goes_back(self, count: int) -> bool:
        return count >= self._seen or self._held - count >= min(self._seen - count, self.capacity - 1)

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if not self._slots:
            shape = (batch_size, kv_heads, self.capacity)
            for name, head_dim in (("keys", key_head_dim), ("values", value_head_dim)):
                self._slots[name] = self.context.placement.allocate((*shape, head_dim), dtype, device).zero_()

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = {"keys": key_states, "values": value_states}
        for name, states in given.items():
            check_states(states, self._slots.get(name), name)
        check_pair(key_states, value_states)
        batch, heads, new, key_dim = key_states.shape
        self._check_room(new)
        self.early_initialization(batch, heads, key_dim, value_states.shape[3], key_states.dtype, key_states.device)
        returned = {name: self._write(name, states) for name, states in given.items()}
        self._seen += new
        self._held = min(self._held + new, self.capacity)
        return returned["keys"], returned["values"]

    def _check_room(self, new: int) -> None:
        if self.spec.window is None and self._seen + new > self.capacity:
            raise CapacityExceeded(self.capacity, self._seen, new)

    def _write(self, name: str, states: torch.Tensor) -> torch.Tensor:
        slots, new = self._slots[name], states.shape[2]
        past = torch.arange(self._seen - self._past(), self._seen, device=states.device) % self.capacity
        ordered = torch.cat([slots[:, :, past], states], dim=2)
        kept = states.detach()[:, :, -self.capacity :]
        last = self._seen + new
        positions = torch.arange(last - kept.shape[2], last, device=states.device) % self.capacity
        slots.index_copy_(2, positions, kept)
        if self._is_whole(new):
            return torch.cat([ordered, slots[:, :, last:]], dim=2) if states.requires_grad else slots
        return ordered

    def _is_whole(self, new: int) -> bool:
        """Whether an update of `new` tokens returns the slots as they are."""
        return self._seen + new <= self.capacity or (new == 1 and self._held >= self.capacity - 1)

    def _past(self) -> int:
        return self._seen if self.spec.window is None else min(self._seen, self.capacity - 1)

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        if self._is_whole(query_length):
            return self.capacity, max(0, self._seen + query_length - self.capacity)
        return self._past() + query_length, self._seen - self._past()

    def get_max_length(self) -> int:
        return self.capacity if self.spec.window is None else -1

    def activate_past_recording(self) -> None:
        if self.spec.window is not None:
            raise self._refuse("activate_past_recording [records_past]", "Choose dynamic")

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        if tokens and self.spec.window is not None and not self._goes_back(-tokens):
            raise self._refuse(f"crop({tokens}) past the window [records_past]", "Choose dynamic")

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        self._seen = max(0, self._seen + tokens)
        self._held = max(0, self._held + tokens) if self._seen else 0

    def reset(self) -> None:
        self._slots = {}
        self._seen = self._held = 0
        self._home = None

    def storage(self) -> dict[str, torch.Tensor]:
        return dict(self._slots)

    def metadata(self) -> dict[str, int]:
        return {"seen": self._seen, "held": self._held}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        for name, tensor in storage.items():
            slots = self._slots.get(name)
            if slots is not None and slots.shape == tensor.shape and slots.dtype == tensor.dtype:
                slots.copy_(tensor.detach())
            else:
                self._slots[name] = tensor.detach().clone()
        if not storage:
            self._slots = {}
        self._seen, self._held = metadata["seen"], metadata["held"]


class HolderConfig(BackendConfig):
    """Config of `good-holder`."""

    inner: str = "dynamic"


def hold(spec: LayerSpec, config: HolderConfig, context: BuildContext) -> CacheLayer:
    """Return a layer of the backend that `inner` names."""
    inner = resolve(config.inner)
    return inner.backend.build_layer(spec, inner.config, context)
