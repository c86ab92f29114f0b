"""Reset: as new."""

from __future__ import annotations

import pytest
import torch

from kvrack_spec.compare import expect_same
from kvrack_spec.expect import expect_equal
from kvrack_spec.subject import Shape, Subject

NEXT = [
    Shape(),
    Shape(batch=1),
    Shape(batch=4, heads=1),
    Shape(key_dim=64, value_dim=64),
    Shape(dtype=torch.bfloat16),
]


@pytest.mark.rule("L23")
@pytest.mark.parametrize("shape", NEXT, ids=str)
@pytest.mark.parametrize("fill", [(3, 0), (55, 90)], ids=str)
def test_as_new(subject: Subject, kind: str, fill: tuple[int, int], shape: Shape) -> None:
    layer = subject.filled(kind, *fill)
    layer.reset()
    expect_equal(int(layer.get_seq_length()), 0, "get_seq_length() after reset()")
    new = subject.layer(kind)
    for step, tokens in enumerate((7, 1, 1)):
        expect_same(layer, new, *subject.states(tokens, shape, seed=50 + step))


@pytest.mark.rule("L23")
def test_reset_of_an_empty_layer(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    layer.reset()
    layer.reset()
    expect_same(layer, subject.layer(kind), *subject.states(4))
