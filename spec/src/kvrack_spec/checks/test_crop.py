"""Crop, and recording what a crop needs."""

from __future__ import annotations

import pytest

import kvrack
from kvrack.layer import AttentionLayer
from kvrack_spec.compare import Unchanged, expect_same
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.subject import WINDOW, Subject

CROPPED = 2.0
"""What a lossy layer may differ after a crop, in times its bound: tokens cut out of a block are decoded, and encoded
once more with others."""


def _given(subject: Subject, layer: AttentionLayer, tokens: int, start: int = 0) -> None:
    """Give the layer tokens `start` to `tokens`: up to 9 at once if it is empty, then one by one."""
    for position in range(start, tokens):
        if position == 0:
            first = min(9, tokens)
            keys, values = subject.states(9)
            layer.update(keys[:, :, :first], values[:, :, :first])
        elif position >= 9:
            layer.update(*subject.states(1, seed=position))


@pytest.mark.rule("L18", "B4")
@pytest.mark.capability("crops")
@pytest.mark.parametrize("tokens", [12, 60, 141])
@pytest.mark.parametrize("removed", [1, 2, 7])
def test_crop_leaves_what_fewer_tokens_would_have_left(subject: Subject, tokens: int, removed: int) -> None:
    layer, twin = subject.layer(), subject.layer()
    if layer.capabilities.window is not None and layer.capabilities.records_past:
        layer.activate_past_recording()
    _given(subject, layer, tokens)
    _given(subject, twin, tokens - removed)
    layer.crop(-removed)
    for seed in (500, 501):
        expect_same(layer, twin, *subject.states(1, seed=seed), times=CROPPED)


@pytest.mark.rule("L18", "B4")
@pytest.mark.capability("crops")
def test_crop_of_a_window_not_yet_passed(subject: Subject, windowed: str) -> None:
    layer, twin = subject.layer(windowed), subject.layer(windowed)
    states = subject.states(WINDOW - 2)
    layer.update(*states)
    twin.update(*(part[:, :, : WINDOW - 4] for part in states))
    layer.crop(-2)
    expect_same(layer, twin, *subject.states(1, seed=500), times=CROPPED)


@pytest.mark.rule("L19")
@pytest.mark.capability("crops")
@pytest.mark.parametrize("removed", [3, 5, 1000])
def test_removing_more_than_there_is_empties(subject: Subject, kind: str, removed: int) -> None:
    layer = subject.layer(kind)
    layer.update(*subject.states(3))
    layer.crop(-removed)
    expect_equal(int(layer.get_seq_length()), 0, f"get_seq_length() after crop({-removed}) of 3 tokens")
    expect_same(layer, subject.layer(kind), *subject.states(4, seed=3))


@pytest.mark.rule("L19")
@pytest.mark.capability("crops")
def test_crop_of_an_empty_layer_leaves_it_empty(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    layer.crop(-2)
    expect_equal(int(layer.get_seq_length()), 0, "get_seq_length() of an empty layer after crop(-2)")
    expect_same(layer, subject.layer(kind), *subject.states(4, seed=3))


@pytest.mark.rule("L20")
@pytest.mark.capability("crops")
def test_crop_of_nothing_removes_nothing(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind)
    twin = subject.filled(kind)
    layer.crop(0)
    expect_same(layer, twin, *subject.states(1, seed=9))


@pytest.mark.rule("L20")
def test_crop_of_a_positive_number_is_refused(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind)
    for call in (layer.check_crop, layer.crop):
        with Unchanged(layer, f"{call.__name__}(2)"):
            try:
                call(2)
            except kvrack.UnsupportedOperation:
                expect(not layer.capabilities.crops, f"ValueError from {call.__name__}(2)", "UnsupportedOperation")
            except ValueError:
                pass
            else:
                broken(f"ValueError from {call.__name__}(2)", "no error")


@pytest.mark.rule("L21")
def test_crop_does_what_it_says_beforehand(subject: Subject, kind: str) -> None:
    for record in (None, "always", "late") if subject.capabilities(kind).records_past else (None,):
        for tokens in (3, 12):
            for removed in (1, 2):
                _expect_foretold(subject, kind, tokens, removed, record)


def _expect_foretold(subject: Subject, kind: str, tokens: int, removed: int, record: str | None) -> None:
    layer = subject.filled(kind, tokens, 0, record=record == "always")
    twin = subject.filled(kind, tokens, 0, record=record == "always")
    if record == "late":
        layer.activate_past_recording()
        twin.activate_past_recording()
    foretold = layer.is_croppable
    with Unchanged(layer, f"check_crop({-removed})"):
        refusal = _raised(layer.check_crop, -removed)
    if refusal is not None:
        with Unchanged(layer, f"a refused crop({-removed})"):
            again = _raised(layer.crop, -removed)
        expect_equal(str(again), str(refusal), f"crop({-removed}) to raise what check_crop raises,")
        expect(isinstance(refusal, kvrack.UnsupportedOperation), "UnsupportedOperation", type(refusal).__name__)
        expect_same(layer, twin, *subject.states(1, seed=9))
    else:
        error = _raised(layer.crop, -removed)
        expect(error is None, f"crop({-removed}), which check_crop allowed, to work", f"{error!r}")
    if removed == 1:
        expect_equal(foretold, refusal is None, f"is_croppable before crop(-1) of {tokens} tokens")


def _raised(call: object, tokens: int) -> Exception | None:
    try:
        call(tokens)  # type: ignore[operator]
    except Exception as error:
        return error
    return None


@pytest.mark.rule("L22", "B4")
@pytest.mark.capability("records_past")
@pytest.mark.parametrize("removed", [1, 3, WINDOW, 11])
def test_a_recorded_past_can_be_gone_back_to(subject: Subject, kind: str, removed: int) -> None:
    layer = subject.layer(kind)
    layer.activate_past_recording()
    _given(subject, layer, 15)
    expect(layer.is_croppable, "is_croppable while recording", False)
    layer.crop(-removed)
    twin = subject.layer(kind)
    _given(subject, twin, 15 - removed)
    for seed in (500, 501):
        expect_same(layer, twin, *subject.states(1, seed=seed), times=CROPPED)


@pytest.mark.rule("L22")
@pytest.mark.capability("records_past")
def test_recording_changes_nothing_that_is_seen(subject: Subject, kind: str) -> None:
    layer, twin = subject.layer(kind), subject.layer(kind)
    layer.activate_past_recording()
    for step, new in enumerate((9, 1, 1, 1)):
        # Tokens that a window dropped aren't encoded with the others, and sums of other lengths round otherwise.
        expect_same(layer, twin, *subject.states(new, seed=step), times=2.0)


@pytest.mark.rule("L22")
@pytest.mark.capability("records_past")
def test_crop_of_nothing_frees_the_recorded_past(subject: Subject, windowed: str) -> None:
    layer = subject.filled(windowed, 55, 9, record=True)
    recorded = _elements(layer)
    layer.crop(0)
    freed = _elements(layer)
    expect(freed < recorded, f"crop(0) to free the past: fewer than {recorded} elements in storage()", freed)


def _elements(layer: AttentionLayer) -> int:
    return sum(tensor.numel() for tensor in layer.storage().values())
