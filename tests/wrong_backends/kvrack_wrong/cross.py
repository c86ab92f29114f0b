"""Faults of backends that keep an encoder's output; beside it, dynamic's layers."""

from __future__ import annotations

from dataclasses import replace

import torch

from kvrack import BackendConfig, BuildContext, CacheLayer, LayerSpec, resolve
from kvrack.layer import refuse_positive
from kvrack_encoder_decoder.config import EncoderDecoderConfig
from kvrack_encoder_decoder.layer import CrossLayer


class CroppedWithTheDecoder(CrossLayer):
    """Fault: the decoder's crop takes tokens of the encoder's output."""

    def crop(self, tokens: int) -> None:
        refuse_positive(tokens)
        self.inner.crop(tokens)


class MixesTwoOutputs(CrossLayer):
    """Fault: a second encoder's output is appended to the first."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner.update(key_states, value_states)


class KeepsTheDecodersWindow(CrossLayer):
    """Fault: what is kept is cut to a window."""

    @property
    def keys(self) -> torch.Tensor | None:
        keys = self.inner.keys
        return None if keys is None else keys[:, :, -6:]

    @property
    def values(self) -> torch.Tensor | None:
        values = self.inner.values
        return None if values is None else values[:, :, -6:]


class CrossConfig(BackendConfig):
    """No settings; what is held is dynamic's."""


def _build(kept: type[CrossLayer], spec: LayerSpec, context: BuildContext) -> CacheLayer:
    if spec.cross_attention:
        return kept(spec, EncoderDecoderConfig(), context)
    inner = resolve("dynamic")
    return inner.backend.build_layer(replace(spec, states=0), inner.config, context)


def build_cropped(spec: LayerSpec, config: CrossConfig, context: BuildContext) -> CacheLayer:
    return _build(CroppedWithTheDecoder, spec, context)


def build_mixes(spec: LayerSpec, config: CrossConfig, context: BuildContext) -> CacheLayer:
    return _build(MixesTwoOutputs, spec, context)


def build_windowed(spec: LayerSpec, config: CrossConfig, context: BuildContext) -> CacheLayer:
    return _build(KeepsTheDecodersWindow, spec, context)
