"""Forks under torch.compile: the tokens of a cache that was alone, no break, a graph more where a step copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

Step = Callable[..., object]


def filled(model: PreTrainedModel, backend: str) -> kt.TransformersCache:
    ids = torch.randint(2, 64, (1, 9), generator=torch.Generator().manual_seed(9))
    cache = kt.create_cache(model, backend, max_length=64)
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
    return cache


def decode(step: Step, cache: kt.TransformersCache, first: int) -> list[int]:
    """Return the greedy tokens of six steps from token `first` on."""
    tokens = [first]
    with torch.no_grad():
        for _ in range(6):
            logits: torch.Tensor = step(torch.tensor([tokens[-1:]]), **{CACHE_ARGUMENT: cache}).logits  # type: ignore[attr-defined]
            tokens.append(int(logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("model", ["mixed"], indirect=True)
@pytest.mark.parametrize(("backend", "more"), [("static", 2), ("dynamic", 1)])
def test_a_fork_and_its_original_decode_compiled(model: PreTrainedModel, backend: str, more: int, graphs) -> None:
    compiled: Step = torch.compile(model, fullgraph=True, backend="eager")
    alone = [decode(compiled, filled(model, backend), first) for first in (5, 6)]
    made, _ = graphs()
    cache = filled(model, backend)
    branches = [cache.fork(), cache]
    # The first step of each is compiled while its memory is shared, and needs a graph that copies; a ring's owner too.
    assert [decode(compiled, branch, first) for branch, first in zip(branches, (5, 6), strict=True)] == alone
    assert graphs() == (made + more, {})
