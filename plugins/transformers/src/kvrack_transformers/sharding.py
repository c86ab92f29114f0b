"""Which part of a model's heads this process has, where transformers split the model over ranks (`tp_plan`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import distributed

from kvrack import LayerSpec, Shard

KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")
"""The last part of the names of the modules that make keys, fused or not."""


def shard_of(model: Any) -> Shard | None:
    """Return this rank's part of a model split by tensor parallelism, None for a whole model or a config."""
    count = getattr(model, "_tp_size", None) or 1
    if count < 2:
        return None
    mesh = model._device_mesh
    # With several ways to split at once the mesh has a dimension for each, this one by name.
    rank = mesh.get_local_rank("tp") if mesh.ndim > 1 else mesh.get_local_rank()
    return Shard(rank, count)


def all_agree(model: Any, value: object) -> bool:
    """Return whether each rank of a model that is split gives the same `value`, True for a whole model.

    Every rank must call it, and gets the same answer. `value` is one that pickle takes.
    """
    shard = shard_of(model)
    if shard is None:
        return True
    mesh = model._device_mesh
    values: list[object] = [None] * shard.count
    distributed.all_gather_object(values, value, mesh.get_group("tp") if mesh.ndim > 1 else mesh.get_group())
    return all(each == values[0] for each in values)


def per_rank(layer: LayerSpec, model: Any, shard: Shard | None) -> LayerSpec:
    """Return `layer` with the heads that this rank's keys will have, None where the plan doesn't tell.

    Args:
        layer: as the whole model has it.
        model: the model, split or not.
        shard: this rank's part.
    """
    if shard is None or layer.kv_heads is None:
        return layer
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    styles = {style for name, style in plan.items() if name.rpartition(".")[2] in KEY_PROJECTIONS}
    if not styles:
        return layer
    heads, rest = divmod(layer.kv_heads, shard.count)
    # Heads are what arrives: a plan that packs or replicates them in its own way is not guessed at.
    return replace(layer, kv_heads=heads if styles == {"colwise"} and not rest else None)
