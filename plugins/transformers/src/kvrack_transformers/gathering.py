"""A cache from the keys and values that torch's data parallelism gathered from the devices.

`torch.nn.DataParallel` rebuilds an output that it doesn't know from what iterating over each device's
copy yields, joined row by row: transformers' caches take that in their constructor, and so do kvrack's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import kvrack
from kvrack import AttentionLayer, LayerSpec, ModelSpec, UnsupportedOperation

BACKEND = "dynamic"
"""What was gathered is plain keys and values, whatever held them before."""

Gathered = Iterable[Sequence[torch.Tensor | None]]
"""For each layer keys, values and window, as iterating over a cache yields them; once more for cross-attention."""


def rebuilt(gathered: Gathered) -> kvrack.Cache:
    """Return a cache that holds what was gathered.

    A layer without keys and values (it reads another's, or keeps states, which nothing gathers) holds
    nothing and refuses to be updated.

    Args:
        gathered: three tensors for each layer, or six where there is an encoder.

    Raises UnknownBackend where kvrack-dynamic isn't installed, UnsupportedOperation where every layer
    has a window that is full: what left it isn't gathered, so nothing says how many tokens were seen.
    """
    layers = [tuple(each) for each in gathered]
    own, cross = [each[:3] for each in layers], [each[3:6] for each in layers if len(each) == 6]
    spec = ModelSpec(layers=tuple(map(_spec, own)), cross_layers=tuple(map(_spec, cross)))
    cache = kvrack.create_cache(BACKEND, spec)
    seen = _seen(own)
    for layer, (keys, values, _) in zip(cache.layers, [*own, *cross], strict=True):
        if keys is None or values is None or not isinstance(layer, AttentionLayer):
            continue
        layer.update(keys, values)
        if layer.spec.window is not None:
            layer.restore(layer.storage(), {**layer.metadata(), "seen": seen})
    return cache


def _spec(layer: Sequence[torch.Tensor | None]) -> LayerSpec:
    keys, _, window = layer
    if keys is None:
        return LayerSpec(attention=None)
    return LayerSpec() if window is None else LayerSpec(attention="sliding", window=_window(window))


def _window(window: torch.Tensor) -> int:
    # Gathered from several devices it is as many times the same number.
    return int(window.flatten()[0])


def _seen(layers: Sequence[Sequence[torch.Tensor | None]]) -> int:
    """Return how many tokens were seen: as many as a layer holds that has dropped none."""
    held = [(keys.shape[2], window) for keys, _, window in layers if keys is not None]
    whole = [tokens for tokens, window in held if window is None or tokens < _window(window) - 1]
    if held and not whole:
        raise UnsupportedOperation(
            BACKEND,
            "gathering a cache whose layers all have full windows",
            "Keep the cache of each device with its replica, or use torch's DistributedDataParallel",
        )
    return max(whole, default=0)
