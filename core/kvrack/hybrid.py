"""HybridLayer: attention and states in one layer, each kept by a layer of its own."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, TypeVar

import torch

from kvrack.backend import Capabilities
from kvrack.config import BackendConfig
from kvrack.context import BuildContext
from kvrack.layer import AttentionLayer, CacheLayer, Elsewhere, StateLayer, allocations
from kvrack.model import LayerSpec

ATTENTION = "attention."
"""Before each name of the attention layer's in `storage()` and `metadata()`; the states' stay as they are."""

Held = TypeVar("Held", torch.Tensor, int)


class HybridLayer(AttentionLayer, StateLayer):
    """A layer that attends and keeps states (Falcon-H1, Zamba): it holds one layer of each and delegates.

    The attention layer is any backend's: it may encode or preallocate, and the states beside it
    stay exact.

    Args:
        spec: of both parts together.
        config: of the backend that builds the layer.
        context: the same.
        attention: keeps the keys and values.
        states: keeps the states.
    """

    def __init__(
        self,
        spec: LayerSpec,
        config: BackendConfig,
        context: BuildContext,
        attention: AttentionLayer,
        states: StateLayer,
    ) -> None:
        super().__init__(spec, config, context)
        self.attention = attention
        self.states = states

    @property
    def _parts(self) -> tuple[AttentionLayer, StateLayer]:
        return self.attention, self.states

    @property
    def capabilities(self) -> Capabilities:
        states = self.states.capabilities
        attention = self.attention.capabilities
        return replace(
            attention,
            crops=attention.crops and states.crops,
            records_past=attention.records_past and states.records_past,
            offloads=attention.offloads and states.offloads,
            compiles=attention.compiles and states.compiles,
            stable_address=attention.stable_address and states.stable_address,
        )

    @property
    def is_compileable(self) -> bool:
        return self.attention.is_compileable

    @property
    def record_past(self) -> bool:
        """Whether what a window or a state would drop is kept until the next `crop`."""
        return self.states.record_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        for part in self._parts:
            part.record_past = value

    # --- attention ------------------------------------------------------------------------------

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.attention.update(key_states, value_states)

    def early_initialization(
        self,
        batch_size: int,
        kv_heads: int,
        key_head_dim: int,
        value_head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # States have shapes of their own, which only their first update tells.
        self.attention.early_initialization(batch_size, kv_heads, key_head_dim, value_head_dim, dtype, device)

    def get_seq_length(self) -> int:
        return self.attention.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.attention.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return self.attention.get_max_length()

    @property
    def keys(self) -> torch.Tensor | None:
        return self.attention.keys

    @property
    def values(self) -> torch.Tensor | None:
        return self.attention.values

    # --- states ---------------------------------------------------------------------------------

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        return self.states.update_conv_state(conv_states, state_idx, conv_kernel_size)

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0) -> torch.Tensor:
        return self.states.update_recurrent_state(recurrent_states, state_idx)

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get_conv_state(state_idx)

    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self.states.get_recurrent_state(state_idx)

    def has_previous_state(self, state_idx: int | None = None) -> bool:
        return self.states.has_previous_state(state_idx)

    # --- both -----------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        for part in self._parts:
            part.activate_past_recording()

    def check_crop(self, tokens: int) -> None:
        for part in self._parts:
            part.check_crop(tokens)

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        for part in self._parts:
            part.crop(tokens)

    def reset(self) -> None:
        for part in self._parts:
            part.reset()

    def offload(self) -> None:
        for part in self._parts:
            part.offload()

    def prefetch(self) -> None:
        for part in self._parts:
            part.prefetch()

    @property
    def is_initialized(self) -> bool:
        return any(part.is_initialized for part in self._parts)

    @property
    def batch_size(self) -> int:
        return next((part.batch_size for part in self._parts if part.is_initialized), -1)

    def elsewhere(self) -> list[Elsewhere]:
        attention, states = self.attention.elsewhere(), self.states.elsewhere()
        if not (attention or states):
            return []
        # Where one part is elsewhere, the other is told by its device, since all of the layer must be in the list.
        attention, states = attention or _on_device(self.attention), states or _on_device(self.states)
        return [*(replace(each, role=f"{ATTENTION}{each.role}") for each in attention), *states]

    def storage(self) -> dict[str, torch.Tensor]:
        return _joined(self.attention.storage(), self.states.storage())

    def metadata(self) -> dict[str, int]:
        return _joined(self.attention.metadata(), self.states.metadata())

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self.attention.restore(_of_attention(storage), _of_attention(metadata))
        self.states.restore(_of_states(storage), _of_states(metadata))

    def flatten(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        attention, states = self.attention.flatten(), self.states.flatten()
        return _joined(attention[0], states[0]), _joined(attention[1], states[1])

    def unflatten(self, tensors: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self.attention.unflatten(_of_attention(tensors), _of_attention(metadata))
        self.states.unflatten(_of_states(tensors), _of_states(metadata))

    def twin(self) -> HybridLayer:
        return HybridLayer(self.spec, self.config, self.context, self.attention.twin(), self.states.twin())

    def fork(self, memo: dict[int, Any] | None = None) -> HybridLayer:
        memo = {} if memo is None else memo
        return self._copy(memo, self.attention.fork(memo), self.states.fork(memo))

    def __deepcopy__(self, memo: dict[int, Any]) -> HybridLayer:
        return self._copy(memo, copy.deepcopy(self.attention, memo), copy.deepcopy(self.states, memo))

    def _copy(self, memo: dict[int, Any], attention: AttentionLayer, states: StateLayer) -> HybridLayer:
        context = copy.deepcopy(self.context, memo)
        twin = memo[id(self)] = HybridLayer(self.spec, self.config, context, attention, states)
        return twin


def _on_device(part: CacheLayer) -> list[Elsewhere]:
    storage = part.storage()
    sizes = allocations(storage)
    return [Elsewhere(name, str(tensor.device), sizes[name]) for name, tensor in storage.items()]


def _joined(attention: dict[str, Held], states: dict[str, Held]) -> dict[str, Held]:
    return {**{f"{ATTENTION}{name}": each for name, each in attention.items()}, **states}


def _of_attention(named: dict[str, Held]) -> dict[str, Held]:
    return {name.removeprefix(ATTENTION): each for name, each in named.items() if name.startswith(ATTENTION)}


def _of_states(named: dict[str, Held]) -> dict[str, Held]:
    return {name: each for name, each in named.items() if not name.startswith(ATTENTION)}
