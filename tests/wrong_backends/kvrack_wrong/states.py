"""`good-states`: fixed-size states, replaced and concatenated; attention layers are dynamic's."""

from __future__ import annotations

import torch

from kvrack import BackendConfig, BuildContext, CacheLayer, Capabilities, LayerSpec, StateLayer, resolve
from kvrack.layer import refuse_positive


class PlainStateLayer(StateLayer):
    """Each state a tensor, the convolution ones as wide as the first update made them."""

    def __init__(self, spec: LayerSpec, config: BackendConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context)
        self._held: dict[str, torch.Tensor] = {}

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(grows=True, offloads=True, lossless=True)

    def update_conv_state(self, conv_states: torch.Tensor, state_idx: int = 0) -> torch.Tensor:
        name = f"conv.{state_idx}"
        past = [self._held[name]] if name in self._held else []
        everything = torch.cat([*past, conv_states], dim=-1)
        width = past[0].shape[-1] if past else conv_states.shape[-1]
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
    """Return a state layer for a spec with states, else dynamic's layer."""
    if spec.states:
        return PlainStateLayer(spec, config, context)
    inner = resolve("dynamic")
    return inner.backend.build_layer(spec, inner.config, context)


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


def build_half_reorder(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    return HalfReorder(spec, config, context) if spec.states else build(spec, config, context)


def build_half_crop(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    return HalfCrop(spec, config, context) if spec.states else build(spec, config, context)


def build_forgets_reset(spec: LayerSpec, config: BackendConfig, context: BuildContext) -> CacheLayer:
    return ForgetsReset(spec, config, context) if spec.states else build(spec, config, context)
