"""Caches as pytrees, so that torch.export and torch's tree functions see their tensors.

The leaves are what each layer names in `CacheLayer.flatten`; the context is one JSON document that
says how the cache was built, so windows, kinds of layers and lengths survive, and contexts can be
compared and written with an exported program.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree

from kvrack.cache import Cache
from kvrack.recipe import Recipe


def flatten(cache: Cache) -> tuple[list[torch.Tensor], str]:
    """Return the tensors of `cache`, and the context that `unflatten` needs besides."""
    named, context = _flatten(cache)
    return [tensor for _, tensor in named], context


def unflatten(leaves: Iterable[Any], context: str) -> Cache:
    """Return a cache of these tensors, built as the flattened one was.

    Layers that return unused slots take the tensors for their own, so that what a graph writes is
    seen; others copy them.
    """
    document = json.loads(context)
    cache = Recipe.model_validate(document["recipe"]).build()
    cache.grow_to(len(document["layers"]))
    remaining = iter(leaves)
    for layer, described in zip(cache.layers, document["layers"], strict=True):
        layer.unflatten({name: next(remaining) for name in described["tensors"]}, described["metadata"])
    return cache


def _flatten(cache: Cache) -> tuple[list[tuple[str, torch.Tensor]], str]:
    named: list[tuple[str, torch.Tensor]] = []
    layers = []
    for index, layer in enumerate(cache.layers):
        tensors, metadata = layer.flatten()
        named += [(f"{index}.{name}", tensor) for name, tensor in tensors.items()]
        layers.append({"tensors": list(tensors), "metadata": metadata})
    document = {"recipe": cache.recipe().model_dump(), "layers": layers}
    return named, json.dumps(document, sort_keys=True)


def _flatten_with_keys(cache: Cache) -> tuple[list[tuple[_pytree.KeyEntry, Any]], str]:
    named, context = _flatten(cache)
    return [(_pytree.MappingKey(name), tensor) for name, tensor in named], context


def register() -> None:
    """Make torch's tree functions know `kvrack.Cache`. Called once, by `kvrack.cache`."""
    _pytree.register_pytree_node(
        Cache,
        flatten,
        unflatten,
        serialized_type_name="kvrack.Cache",
        flatten_with_keys_fn=_flatten_with_keys,
        to_dumpable_context=lambda context: context,
        from_dumpable_context=lambda context: context,
    )
