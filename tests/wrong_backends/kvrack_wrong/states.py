"""`good-states`: fixed-size states, replaced and concatenated; attention layers are dynamic's."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrack import (
    AttentionLayer,
    BackendConfig,
    BuildContext,
    CacheLayer,
    Capabilities,
    HybridLayer,
    LayerSpec,
    StateLayer,
    resolve,
)
from kvrack.layer import refuse_positive
from kvrack_mamba.buffer import StateBuffer
from kvrack_mamba.states import FixedStateLayer


class PlainStateLayer(StateLayer):
    """Each state a tensor, the convolution ones as wide as the first update made them."""

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self._held: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(grows=True, offloads=True, lossless=True)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        name = f"conv.{state_idx}"
        if name in self._held:
            width = self._held[name].shape[-1]
            everything = torch.cat([self._held[name], conv_states], dim=-1)
        else:
            width = conv_kernel_size or conv_states.shape[-1]
            everything = torch.nn.functional.pad(conv_states, (max(0, width - conv_states.shape[-1]), 0))
        self._held[name] = everything[..., -width:].detach().clone()
        return everything

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0) -> torch.Tensor:
        self._held[f"recurrent.{state_idx}"] = recurrent_states.detach().clone()
        return self._held[f"recurrent.{state_idx}"]

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self._held.get(f"conv.{state_idx}")

    def get_recurrent_state(self, state_idx: int = 0) -> torch.Tensor | None:
        return self._held.get(f"recurrent.{state_idx}")

    def has_previous_state(self, state_idx: int | None = None) -> bool:
        wanted = range(self.spec.states) if state_idx is None else (state_idx,)
        return all(f"conv.{i}" in self._held or f"recurrent.{i}" in self._held for i in wanted)

    def storage(self) -> dict[str, torch.Tensor]:
        return dict(self._held)

    def metadata(self) -> dict[str, int]:
        return {}

    def restore(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        self._held = {name: tensor.detach().clone() for name, tensor in storage.items()}

    def reset(self) -> None:
        self._held = {}

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        if tokens and self._held:
            raise self._refuse(f"crop({tokens}) of states [crops]", "Call reset() and start anew")

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)


def build(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    """Return a state layer, dynamic's layer where the spec attends, and one that holds both for both."""
    return _build(PlainStateLayer, spec, config, context)


def _build(kept: type[StateLayer], spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    states = kept(LayerSpec(attention=None, states=spec.states), config, context)
    if spec.attention is None:
        return states
    inner = resolve("dynamic")
    attention = inner.backend.build_layer(replace(spec, states=0), inner.config, context)
    assert isinstance(attention, AttentionLayer)
    return HybridLayer(spec, config, context, attention, states) if spec.states else attention


class HalfReorder(PlainStateLayer):
    """Fault: batch operations move the convolution states, and leave the recurrent ones."""

    def _replace(self, change):  # type: ignore[no-untyped-def]
        moved = {name: change(t) if name.startswith("conv") else t for name, t in self._held.items()}
        self.restore(moved, self.metadata())


class HalfCrop(PlainStateLayer):
    """Fault: crop cuts the convolution states and leaves the recurrent ones."""

    def check_crop(self, tokens: int) -> None:
        refuse_positive(tokens)

    def crop(self, tokens: int) -> None:
        self._held = {name: t.roll(1, -1) if name.startswith("conv") else t for name, t in self._held.items()}


class ForgetsReset(PlainStateLayer):
    """Fault: reset leaves the convolution states."""

    def reset(self) -> None:
        self._held = {name: t for name, t in self._held.items() if name.startswith("conv")}


class StatesConfig(BackendConfig):
    """What mamba's states need, and no other backend's name: these hold none."""

    recorded_states: int = 4


class HandsOutCopies(FixedStateLayer):
    """Fault: what a model may write to is a copy."""

    def get_conv_state(self, state_idx: int = 0) -> torch.Tensor | None:
        state = super().get_conv_state(state_idx)
        return None if state is None else state.clone()


class MovesStates(FixedStateLayer):
    """Fault: each update of a recurrent state takes new memory."""

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0) -> torch.Tensor:
        self._recurrent[state_idx] = StateBuffer()
        return super().update_recurrent_state(recurrent_states, state_idx)


class GoesBackHalfway(FixedStateLayer):
    """Fault: going back, the recurrent states stay where they are."""

    def crop(self, tokens: int) -> None:
        stayed = [None if state.view() is None else state.view().clone() for state in self._recurrent]
        super().crop(tokens)
        for buffer, state in zip(self._recurrent, stayed, strict=True):
            if state is not None:
                buffer.restore(state)


class CountsColumnsWrongly(FixedStateLayer):
    """Fault: convolution states go back one token short."""

    def crop(self, tokens: int) -> None:
        self.check_crop(tokens)
        super().crop(min(0, tokens + 1))


class ReordersAttentionOnly(HybridLayer):
    """Fault: batch operations leave the states of a layer that attends too."""

    def _replace(self, change):  # type: ignore[no-untyped-def]
        self.attention._replace(change)


def build_half_reorder(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    return _build(HalfReorder, spec, config, context)


def build_half_crop(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    return _build(HalfCrop, spec, config, context)


def build_forgets_reset(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    return _build(ForgetsReset, spec, config, context)


def build_copies(spec: LayerSpec, config: StatesConfig, context: BuildContext) -> CacheLayer:
    return _build(HandsOutCopies, spec, config, context)


def build_moves(spec: LayerSpec, config: StatesConfig, context: BuildContext) -> CacheLayer:
    return _build(MovesStates, spec, config, context)


def build_halfway(spec: LayerSpec, config: StatesConfig, context: BuildContext) -> CacheLayer:
    return _build(GoesBackHalfway, spec, config, context)


def build_short(spec: LayerSpec, config: StatesConfig, context: BuildContext) -> CacheLayer:
    return _build(CountsColumnsWrongly, spec, config, context)


def build_attention_only(spec: LayerSpec, config: StatesConfig, context: BuildContext) -> CacheLayer:
    built = _build(FixedStateLayer, spec, config, context)
    if isinstance(built, HybridLayer):
        return ReordersAttentionOnly(spec, config, context, built.attention, built.states)
    return built
