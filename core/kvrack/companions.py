"""Which backend builds a layer: the one that was named, or a companion that holds the named one's layers.

A backend of attention layers need not know of states or of encoders. Where a model has them, the
backend `mamba` keeps the states and `encoder-decoder` the cross-attention, and both build the rest
through the backend that was named: it is handed to them by its name and config, like any setting.
"""

from __future__ import annotations

from typing import Any

from kvrack.config import KNOWN_DISTRIBUTIONS
from kvrack.context import BuildContext
from kvrack.errors import UnknownBackend, UnsupportedOperation
from kvrack.layer import CacheLayer
from kvrack.model import LayerSpec
from kvrack.registry import Resolved, installed, resolve

STATES = "mamba"
"""The backend that keeps states."""

CROSS_ATTENTION = "encoder-decoder"
"""The backend that keeps what a decoder attends to of an encoder's output."""

CAPACITY_KEY = "max_cache_len"
"""The key by which a preallocating backend is told how many tokens a decoder needs."""


def build_layer(resolved: Resolved, spec: LayerSpec, context: BuildContext) -> CacheLayer:
    """Return a new, empty layer from the named backend, or from the companion that this kind of layer needs.

    Raises what `Backend.build_layer` raises, and UnsupportedOperation with the pip line where the
    companion isn't installed.
    """
    builder = builder_of(resolved, spec, context.backend)
    return builder.backend.build_layer(spec, builder.config, context)


def builder_of(resolved: Resolved, spec: LayerSpec, name: str) -> Resolved:
    """Return what builds a layer of this spec when `resolved` was named, as `name`."""
    backend = resolved.backend
    if spec.cross_attention and not backend.cross_attention:
        # An encoder's output is as long as it is: how many tokens the decoder needs says nothing about it.
        config = {key: value for key, value in _dumped(resolved).items() if key != CAPACITY_KEY}
        settings = {"cross_attention": backend.name, "cross_attention_config": config}
        return _companion(CROSS_ATTENTION, settings, name, "a cross-attention layer (of an encoder-decoder model)")
    if spec.states and not backend.states:
        settings = {"attention": backend.name, "attention_config": _dumped(resolved)}
        return _companion(STATES, settings, name, "a layer with states (Mamba, linear attention, convolution)")
    return resolved


def _dumped(resolved: Resolved) -> dict[str, Any]:
    return resolved.config.model_dump(mode="json")


def _companion(companion: str, settings: dict[str, Any], name: str, what: str) -> Resolved:
    if companion not in installed():
        distribution = KNOWN_DISTRIBUTIONS[companion]
        raise UnsupportedOperation(
            name, what, f"It is kept by {distribution}: pip install {distribution}"
        ) from UnknownBackend(companion, list(installed()), distribution)
    return resolve(companion, settings)
