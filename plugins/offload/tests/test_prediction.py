"""Bytes that are carried on from small caches, where each slot on the device has several pieces of its own size."""

from __future__ import annotations

import pytest
import torch

import kvrack


@pytest.mark.parametrize("layers", [2, 5])
def test_resident_bytes_are_predicted_where_keys_and_values_differ(layers: int) -> None:
    spec = kvrack.LayerSpec(kv_heads=1, key_head_dim=48, value_head_dim=8)
    model, tokens = kvrack.ModelSpec.uniform(layers, spec), 3000
    cache = kvrack.create_cache("offload", model, tokens, tier="disk")
    for new in (tokens - 1, 1):
        for index in range(layers):
            cache.update(torch.zeros(1, 1, new, 48), torch.zeros(1, 1, new, 8), index)
    resident = sum(row.nbytes for row in cache.memory() if row.device == "cpu")
    predicted = kvrack.predict_memory("offload", model, tokens, tier="disk")
    assert not predicted.is_constructed
    assert abs(predicted.resident - resident) <= 0.03 * resident
    assert abs(predicted.nbytes - cache.nbytes) <= 0.03 * cache.nbytes
