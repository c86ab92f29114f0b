"""Composites: a backend that holds another by name is as the one it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrack
from kvrack.layer import AttentionLayer
from kvrack_spec.compare import Seen, expect_matching, see
from kvrack_spec.expect import broken, expect_equal
from kvrack_spec.subject import Subject, layer_spec


def _layer(cache: kvrack.Cache) -> AttentionLayer:
    layer = cache.layers[0]
    assert isinstance(layer, AttentionLayer)
    return layer


def _script(subject: Subject, cache: kvrack.Cache, path: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Return what to do with a cache of one layer, each step in words and as a call."""
    layer = _layer(cache)

    def update(new: int, seed: int, target: Callable[[], AttentionLayer] = lambda: layer) -> Callable[[], Seen]:
        return lambda: see(target(), *subject.states(new, seed=seed))

    def loaded() -> AttentionLayer:
        cache.save(path)
        return _layer(kvrack.load(path, subject.device))

    index = torch.tensor([1, 0, 0], device=subject.device)
    rows = torch.tensor([4, 0, 2], device=subject.device)
    return [
        ("a prefill of 9", update(9, 0)),
        *((f"update {step}", update(1, step)) for step in (1, 2, 3)),
        ("get_mask_sizes(1)", lambda: layer.get_mask_sizes(1)),
        ("get_max_length()", layer.get_max_length),
        ("reorder_cache", lambda: layer.reorder_cache(index)),
        ("batch_repeat_interleave", lambda: layer.batch_repeat_interleave(2)),
        ("batch_select_indices", lambda: layer.batch_select_indices(rows)),
        ("an update after batch operations", update(1, 5)),
        ("crop(-1)", lambda: layer.crop(-1)),
        ("an update of a deepcopy", update(1, 6, lambda: copy.deepcopy(layer))),
        ("an update of a loaded cache", update(1, 7, loaded)),
        ("get_seq_length()", lambda: int(layer.get_seq_length())),
        ("reset()", layer.reset),
        ("an update after reset()", update(4, 8)),
    ]


def _outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the name of what it raises."""
    try:
        return call()
    except Exception as error:
        return f"raises {type(error).__name__}"


@pytest.mark.rule("B8")
def test_composite_is_as_what_it_holds(subject: Subject, kind: str, inner: tuple[str, str], tmp_path: Path) -> None:
    key, name = inner
    holder = Subject(subject.name, {**subject.settings, key: name}, subject.device)
    outer = _outcome(lambda: holder.cache(layer_spec(kind)))
    plain = _outcome(lambda: Subject(name, {}, subject.device).cache(layer_spec(kind)))
    if isinstance(plain, str) or isinstance(outer, str):
        built = [each if isinstance(each, str) else "is built" for each in (outer, plain)]
        expect_equal(built[0], built[1], f"a {kind} layer, as of {name} alone,")
        return
    scripts = zip(
        _script(subject, outer, tmp_path / "outer.safetensors"),
        _script(subject, plain, tmp_path / "plain.safetensors"),
        strict=True,
    )
    for (what, call), (_, plain_call) in scripts:
        seen, wanted = _outcome(call), _outcome(plain_call)
        if isinstance(seen, Seen) and isinstance(wanted, Seen):
            expect_matching(seen, wanted.keys, wanted.values, 0.0)
        elif isinstance(seen, Seen) or isinstance(wanted, Seen):
            broken(f"{what} as of {name} alone: {_word(wanted)}", _word(seen))
        else:
            expect_equal(seen, wanted, f"{what}, as of {name} alone,")


def _word(outcome: Any) -> str:
    return "tokens" if isinstance(outcome, Seen) else str(outcome)
