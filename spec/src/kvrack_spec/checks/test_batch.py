"""Batch operations: a layer afterwards is as one that was given the rows so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvrack.layer import AttentionLayer
from kvrack_spec.compare import Unchanged, expect_same
from kvrack_spec.expect import broken, expect_equal
from kvrack_spec.subject import Shape, Subject

FILLS = [(3, 0), (9, 3), (55, 30), (140, 9)]
DTYPES = [torch.float32, torch.bfloat16]


def _rows(subject: Subject, tokens: int, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states whose rows differ in magnitude, so that a scale left behind shows."""
    keys, values = subject.states(tokens, Shape(), seed)
    magnitude = torch.tensor([1.0, 8.0, 64.0], device=keys.device).view(-1, 1, 1, 1)
    return (keys * magnitude).to(dtype), (values * magnitude).to(dtype)


def _expect_rows(
    subject: Subject,
    kind: str,
    dtype: torch.dtype,
    change: Callable[[AttentionLayer], None],
    rows: list[int],
) -> None:
    for prefill, steps in FILLS:
        layer, twin = subject.layer(kind), subject.layer(kind)
        for step, new in enumerate((prefill, *[1] * steps)):
            keys, values = _rows(subject, new, dtype, step)
            layer.update(keys, values)
            twin.update(keys[rows], values[rows])
        change(layer)
        for seed in (100, 101):
            keys, values = _rows(subject, 1, dtype, seed)
            expect_same(layer, twin, keys[rows], values[rows], times=2.0)
        for name, tensor in layer.storage().items():
            expect_equal(tensor.shape[0], len(rows), f"rows of storage()[{name!r}]")


def _indices(subject: Subject, *rows: int) -> torch.Tensor:
    return torch.tensor(rows, device=subject.device)


@pytest.mark.rule("L14")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[2, 0, 1], [1, 1, 1]], ids=str)
def test_reorder(subject: Subject, kind: str, dtype: torch.dtype, rows: list[int]) -> None:
    _expect_rows(subject, kind, dtype, lambda layer: layer.reorder_cache(_indices(subject, *rows)), rows)


@pytest.mark.rule("L15")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeat_interleave(subject: Subject, kind: str, dtype: torch.dtype) -> None:
    rows = [0, 0, 1, 1, 2, 2]
    _expect_rows(subject, kind, dtype, lambda layer: layer.batch_repeat_interleave(2), rows)


@pytest.mark.rule("L16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [[1], [2, 0]], ids=str)
def test_select(subject: Subject, kind: str, dtype: torch.dtype, rows: list[int]) -> None:
    _expect_rows(subject, kind, dtype, lambda layer: layer.batch_select_indices(_indices(subject, *rows)), rows)


@pytest.mark.rule("L16")
def test_select_by_mask(subject: Subject, kind: str) -> None:
    mask = torch.tensor([True, False, True], device=subject.device)
    _expect_rows(subject, kind, torch.float32, lambda layer: layer.batch_select_indices(mask), [0, 2])


OPERATIONS: dict[str, Callable[[AttentionLayer, torch.Tensor], None]] = {
    "reorder_cache": lambda layer, index: layer.reorder_cache(index),
    "batch_select_indices": lambda layer, index: layer.batch_select_indices(index),
}


@pytest.mark.rule("L17")
@pytest.mark.parametrize("operation", [*OPERATIONS, "batch_repeat_interleave"])
def test_on_an_empty_layer_nothing_happens(subject: Subject, kind: str, operation: str) -> None:
    layer = subject.layer(kind)
    if operation in OPERATIONS:
        OPERATIONS[operation](layer, _indices(subject, 0, 0))
    else:
        layer.batch_repeat_interleave(2)
    expect_same(layer, subject.layer(kind), *subject.states(4))


@pytest.mark.rule("L17")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_index_out_of_range_changes_nothing(subject: Subject, kind: str, operation: str) -> None:
    if subject.device != "cpu":
        pytest.skip("an index out of range ends the process on an accelerator")
    layer = subject.filled(kind)
    with Unchanged(layer, f"{operation} of row 7 of 3"):
        try:
            OPERATIONS[operation](layer, _indices(subject, 0, 7))
        except (IndexError, RuntimeError, ValueError):
            pass
        else:
            broken(f"{operation} of row 7 of 3 to raise", "no error")
