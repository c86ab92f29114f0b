"""Composites: a backend that holds another by name is as the one it holds."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import kvrack
from kvrack.layer import AttentionLayer
from kvrack_spec.compare import expect_same
from kvrack_spec.expect import broken, expect_equal
from kvrack_spec.subject import Subject, layer_spec


def _built(subject: Subject, kind: str) -> kvrack.Cache | kvrack.UnsupportedOperation:
    try:
        return subject.cache(layer_spec(kind))
    except kvrack.UnsupportedOperation as error:
        return error


def _layer(cache: kvrack.Cache) -> AttentionLayer:
    layer = cache.layers[0]
    assert isinstance(layer, AttentionLayer)
    return layer


@pytest.mark.rule("B8")
def test_composite_is_as_what_it_holds(subject: Subject, kind: str, inner: tuple[str, str], tmp_path: Path) -> None:
    key, name = inner
    holder = Subject(subject.name, {**subject.settings, key: name}, subject.device)
    outer, plain = _built(holder, kind), _built(Subject(name, {}, subject.device), kind)
    if isinstance(plain, kvrack.UnsupportedOperation):
        if not isinstance(outer, kvrack.UnsupportedOperation):
            broken(f"a {kind} layer refused, as {name} alone refuses it", "a layer")
        return
    if isinstance(outer, kvrack.UnsupportedOperation):
        broken(f"a {kind} layer, as {name} alone builds it", str(outer))
    layer, twin = _layer(outer), _layer(plain)
    for step, new in enumerate((9, 1, 1, 1)):
        expect_same(layer, twin, *subject.states(new, seed=step))
    index = torch.tensor([1, 0, 0], device=subject.device)
    for each in (layer, twin):
        each.reorder_cache(index)
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([4, 0, 2], device=subject.device))
    expect_same(layer, twin, *subject.states(1, seed=5))
    refusals = []
    for each in (layer, twin):
        try:
            each.crop(-1)
            refusals.append(False)
        except kvrack.UnsupportedOperation:
            refusals.append(True)
    expect_equal(refusals[0], refusals[1], "crop(-1) refused:")
    expect_same(copy.deepcopy(layer), copy.deepcopy(twin), *subject.states(1, seed=6))
    outer.save(tmp_path / "outer.safetensors")
    loaded = _layer(kvrack.load(tmp_path / "outer.safetensors", subject.device))
    expect_same(loaded, twin, *subject.states(1, seed=7))
    for each in (layer, twin):
        each.reset()
    expect_same(layer, twin, *subject.states(4, seed=8))
