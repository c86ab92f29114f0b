"""What the tests of kvrack-offload have in common."""

from __future__ import annotations

import copy

import torch

import kvrack
from kvrack.layer import AttentionLayer

WINDOW = 6


def spec(*kinds: str, **fields) -> kvrack.ModelSpec:
    """Return a model of layers of these kinds."""
    layers = [
        kvrack.LayerSpec(**fields) if kind == "full" else kvrack.LayerSpec(attention=kind, window=WINDOW, **fields)
        for kind in kinds
    ]
    return kvrack.ModelSpec(layers=tuple(layers))


def states(new: int, seed: int = 0, batch: int = 2, heads: int = 3, head_dim: int = 16) -> tuple[torch.Tensor, ...]:
    """Return random keys and values."""
    generator = torch.Generator().manual_seed(1000 * seed + new)
    return tuple(torch.randn(batch, heads, new, head_dim, generator=generator) for _ in range(2))


def feed(cache: kvrack.Cache, patterns: tuple[int, ...], seed: int = 0) -> None:
    """Give every layer updates of so many tokens, as a model does: one layer after the other."""
    for step, new in enumerate(patterns):
        for index in range(len(cache)):
            cache.update(*states(new, seed=seed + 31 * step + index), index)


def expect_alike(cache: kvrack.Cache, twin: kvrack.Cache, new: int = 1, seed: int = 500) -> None:
    """Fail unless both caches answer an update of every layer bit for bit alike."""
    for index in range(len(cache)):
        given = states(new, seed=seed + index)
        seen, wanted = cache.update(*given, index), twin.update(*given, index)
        assert all(torch.equal(*pair) for pair in zip(seen, wanted, strict=True)), f"layer {index}"


def state_of(layer: AttentionLayer) -> tuple[dict[str, torch.Tensor], dict[str, int], int]:
    """Return all that a layer holds, copied."""
    storage = {name: tensor.clone() for name, tensor in layer.storage().items()}
    return storage, copy.copy(layer.metadata()), layer.get_seq_length()


def expect_state(layer: AttentionLayer, state: tuple[dict[str, torch.Tensor], dict[str, int], int]) -> None:
    """Fail unless `layer` holds what `state_of` returned."""
    storage, metadata, length = state
    held = layer.storage()
    assert sorted(held) == sorted(storage)
    assert all(torch.equal(held[name], storage[name]) for name in storage)
    assert (layer.metadata(), layer.get_seq_length()) == (metadata, length)
