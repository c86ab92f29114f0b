"""build_layer: the layer of the held backend, elsewhere or, where there is nothing to gain, as it is."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import cache

import torch

from kvrack import AttentionLayer, BuildContext, HybridLayer, LayerSpec, OffloadError, StateLayer
from kvrack.layer import CacheLayer
from kvrack.placement import DEVICE
from kvrack_offload.config import PlaceConfig
from kvrack_offload.inner import build_inner
from kvrack_offload.layer import OffloadedLayer, OffloadedStateLayer

logger = logging.getLogger("kvrack.offload")


def build_layer(spec: LayerSpec, config: PlaceConfig, context: BuildContext) -> CacheLayer:
    """Return a new, empty layer of the backend that `config` names, held where `config` says.

    A layer that stays on the device is the held backend's own: one of the first `resident_layers`;
    a windowed one where `offload_only_non_sliding`; one that other layers read, whose tensors must
    outlive the slot; with states, unless `offload_states`; every one, of tier host, on a machine
    without accelerator, which is told once. So is every layer of an offloading backend within
    another, whose place counts.

    Raises what `kvrack.resolve` raises for the held backend, what that raises for the layer, and
    OffloadError for a folder that can't be written.
    """
    if spec.attention is not None and spec.states:
        # One layer of each kind, since the parts go different ways.
        attention = build_layer(replace(spec, states=0), config, context)
        states = build_layer(LayerSpec(attention=None, states=spec.states), config, context)
        assert isinstance(attention, AttentionLayer)
        assert isinstance(states, StateLayer)
        return HybridLayer(spec, config, context, attention, states)
    if (
        context.placement is not DEVICE
        or not _has_place(config)
        or context.layer_index < config.resident_layers
        or (config.offload_only_non_sliding and spec.window is not None)
        or spec.read_by_others
        or (spec.states and not config.offload_states)
    ):
        return build_inner(spec, config, context)
    return (OffloadedStateLayer if spec.states else OffloadedLayer)(spec, config, context)


def _has_place(config: PlaceConfig) -> bool:
    """Return whether there is an elsewhere. Raises OffloadError for a folder that can't be written."""
    if config.tier == "host":
        if not torch.accelerator.is_available():
            _warn_once()
            return False
        return True
    folder = config.folder
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        seen = "it can't be written" if folder.is_dir() else "there is none" if not folder.exists() else "it is a file"
        raise OffloadError(f"folder={str(folder)!r}: expected a folder that can be written; {seen}. Create it first")
    return True


@cache
def _warn_once() -> None:
    logger.warning(
        "offload: there is no accelerator, so host memory is where the cache is anyway and nothing is moved. "
        "tier='disk' moves it to a file"
    )
