"""Wrong codecs, one fault each, made of `good-int8`."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrack import BuildContext, Capabilities, Codec, CodecConfig, LayerSpec
from kvrack.encoded import EncodedLayer
from kvrack_wrong.int8 import ROLES, Int8Layer


class SelectCutsTailOnly(Int8Layer):
    """Fault: batch_select_indices cuts the tail and leaves the codes."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._held = {name: t[indices] if name.endswith(".tail") else t for name, t in self._held.items()}


class ReorderForgetsScales(Int8Layer):
    """Fault: reorder_cache moves codes and tail, and leaves the scales."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._held = {name: t if name.endswith(".scale") else t[beam_idx] for name, t in self._held.items()}


class BoundUnderstated(Int8Layer):
    """Fault: the declared error is a tenth of the real one."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, relative_error=0.0004)


class SaysLossless(Int8Layer):
    """Fault: lossless is declared of 8 bits."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, lossless=True, relative_error=0.0)


class _Coarse(Int8Layer):
    """Not a backend: 8 bits with room in the declared error, so that one fault doesn't show as another."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, relative_error=0.1)


class ClipsLater(_Coarse):
    """Fault: the scale is frozen by the first update (with room for 6x); what is larger later is clipped."""

    def reset(self) -> None:
        super().reset()
        self._first: dict[str, torch.Tensor] = {}

    def _allocate(self, role: str, states: torch.Tensor) -> None:
        first = getattr(self, "_first", {})
        first[role] = 6 * states.detach().float().abs().amax().clamp_min(1e-37) / 127
        self._first = first
        super()._allocate(role, states)

    def scale_of(self, states: torch.Tensor, role: str) -> torch.Tensor:
        own = super().scale_of(states, role)
        first = getattr(self, "_first", {}).get(role)
        return own if first is None else torch.minimum(own, first)


class EncodesAgain(_Coarse):
    """Fault: at each flush all that is held is decoded and encoded again, with one scale for all of it."""

    def scale_of(self, states: torch.Tensor, role: str) -> torch.Tensor:
        if states.shape[2] == 0:
            return super().scale_of(states, role)
        largest = states.float().abs().amax(dim=(2, 3), keepdim=True).clamp_min(1e-37) / 127
        return largest.expand(-1, -1, states.shape[2], 1)

    def flush(self) -> None:
        for role in ROLES:
            tail = self._held[f"{role}.tail"]
            ready = tail.shape[2] - self.residual
            if ready <= self.residual:
                return
            everything = self.decoded(role)[:, :, : -self.residual]
            self._held.update(self.encode(everything, role))
            self._held[f"{role}.tail"] = tail[:, :, ready:].clone()


class NanFromZeros(Int8Layer):
    """Fault: zeros are divided by their own scale of zero."""

    def encode(self, states: torch.Tensor, role: str) -> dict[str, torch.Tensor]:
        scale = states.float().abs().amax(-1, keepdim=True) / 127
        codes = (states.float() / scale.clamp_min(1e-37)).round().clamp(-127, 127).to(torch.int8)
        return {f"{role}.codes": codes, f"{role}.scale": torch.where(scale == 0, scale / scale, scale)}


class TailTooShort(Int8Layer):
    """Fault: four exact tokens fewer than `residual_length` are kept."""

    def flush(self) -> None:
        self.residual -= 4
        try:
            super().flush()
        finally:
            self.residual += 4


class ScaleOverBatch(Int8Layer):
    """Fault: one scale for all rows of a batch."""

    def scale_of(self, states: torch.Tensor, role: str) -> torch.Tensor:
        return super().scale_of(states, role).amax(0, keepdim=True).expand(states.shape[0], -1, -1, -1)


class SinksConfig(CodecConfig):
    """Config of a codec that keeps the first tokens exact."""

    sink_tokens: int | None = 6


class TooFewSinks(Codec):
    """Fault: two exact tokens fewer than `sink_tokens` are kept at the start."""

    relative_error = 0.006

    @property
    def sink_tokens(self) -> int:
        return super().sink_tokens - 2

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = states.float().abs().amax(-1, keepdim=True).clamp_min(1e-37) / 127
        return {"codes": (states.float() / scale).round().clamp(-127, 127).to(torch.int8), "scale": scale}

    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(encoded["codes"] * encoded["scale"])


def build_too_few_sinks(spec: LayerSpec, config: SinksConfig, context: BuildContext) -> EncodedLayer:
    """Return an encoded layer over `TooFewSinks`."""
    return EncodedLayer(spec, config, replace(context, codec=TooFewSinks))
