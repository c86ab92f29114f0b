"""State layers: convolution inputs and recurrent states of fixed size."""

from __future__ import annotations

import copy

import pytest
import torch

import kvrack
from kvrack.layer import StateLayer
from kvrack_spec.compare import same_bits
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.subject import Subject

KERNEL = 4
STATES = (0, 1)


@pytest.fixture
def layer(subject: Subject) -> StateLayer:
    """A new state layer of two states; the check is not run where the backend keeps none."""
    built = subject.state_layer(len(STATES))
    if built is None:
        pytest.skip("the backend keeps no states")
    return built


def _conv(subject: Subject, columns: int, batch: int = 3, seed: int = 0, channels: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + columns)
    return torch.randn(batch, channels, columns, generator=generator).to(subject.device)


def _recurrent(subject: Subject, batch: int = 3, seed: int = 0, size: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 2, size, 3, generator=generator).to(subject.device)


def _fill(subject: Subject, layer: StateLayer, batch: int = 3) -> None:
    for index in STATES:
        layer.update_conv_state(_conv(subject, KERNEL, batch, seed=index), index)
        layer.update_conv_state(_conv(subject, 1, batch, seed=10 + index), index)
        layer.update_recurrent_state(_recurrent(subject, batch, seed=index), index)


def _read(layer: StateLayer) -> list[torch.Tensor]:
    """Return copies of every state, convolution before recurrent."""
    states = [read(index) for read in (layer.get_conv_state, layer.get_recurrent_state) for index in STATES]
    missing = [number for number, state in enumerate(states) if state is None]
    expect_equal(missing, [], "states that are None after updates of all")
    return [state.clone() for state in states if state is not None]


def _expect_states(layer: StateLayer, wanted: list[torch.Tensor], what: str) -> None:
    for number, (seen, expected) in enumerate(zip(_read(layer), wanted, strict=True)):
        expect(same_bits(seen, expected), f"state {number} {what}", "another state")


@pytest.mark.rule("S1")
@pytest.mark.parametrize("first", [KERNEL, 9])
def test_conv_state_holds_the_newest_columns(subject: Subject, layer: StateLayer, first: int) -> None:
    for index in STATES:
        expect(layer.get_conv_state(index) is None, "get_conv_state None before the first update", "a state")
        everything = torch.empty(0)
        for step, columns in enumerate((first, 1, 1, 2)):
            new = _conv(subject, columns, seed=step + 10 * index)
            returned = layer.update_conv_state(new, index)
            everything = new if step == 0 else torch.cat([everything, new], dim=-1)
            count = min(returned.shape[-1], everything.shape[-1])
            expect(count >= columns, f"at least the {columns} new columns returned", f"{count}")
            expect(
                same_bits(returned[..., -count:], everything[..., -count:]),
                "the newest columns, after those held before",
                "others",
            )
            held = layer.get_conv_state(index)
            if held is None:
                broken("get_conv_state after an update", None)
            kept = held.shape[-1]
            expect(kept <= first, f"at most the {first} columns of the first update held", kept)
            expect(same_bits(held, everything[..., -kept:]), f"the newest {kept} columns held", "others")


@pytest.mark.rule("S2")
def test_recurrent_state_is_replaced(subject: Subject, layer: StateLayer) -> None:
    for index in STATES:
        expect(layer.get_recurrent_state(index) is None, "get_recurrent_state None before the first update", "a state")
    for step in range(3):
        for index in STATES:
            given = _recurrent(subject, seed=step + 10 * index)
            expect(same_bits(layer.update_recurrent_state(given, index), given), "the state given returned", "another")
    for index in STATES:
        held = layer.get_recurrent_state(index)
        expect(held is not None and same_bits(held, _recurrent(subject, seed=2 + 10 * index)), "the newest state", held)


@pytest.mark.rule("S3")
def test_has_previous_state_is_by_index(subject: Subject, layer: StateLayer) -> None:
    expect_equal([layer.has_previous_state(i) for i in STATES], [False, False], "has_previous_state of a new layer")
    layer.update_conv_state(_conv(subject, KERNEL), 0)
    expect_equal([layer.has_previous_state(i) for i in STATES], [True, False], "has_previous_state after state 0")
    expect_equal(layer.has_previous_state(), False, "has_previous_state() with one of two updated")
    layer.update_conv_state(_conv(subject, KERNEL), 1)
    expect_equal(layer.has_previous_state(), True, "has_previous_state() with both updated")
    layer.reset()
    expect_equal(layer.has_previous_state(), False, "has_previous_state() after reset()")


@pytest.mark.rule("S4")
@pytest.mark.parametrize("operation", ["reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_batch_operations_act_on_every_state(subject: Subject, layer: StateLayer, operation: str) -> None:
    _fill(subject, layer)
    before = _read(layer)
    index = torch.tensor([2, 0], device=subject.device)
    if operation == "batch_repeat_interleave":
        layer.batch_repeat_interleave(2)
        wanted = [state.repeat_interleave(2, dim=0) for state in before]
    else:
        getattr(layer, operation)(index)
        wanted = [state[index] for state in before]
    _expect_states(layer, wanted, f"with its rows as {operation} says")


@pytest.mark.rule("S5")
def test_crop_moves_every_state_or_none(subject: Subject, layer: StateLayer) -> None:
    _fill(subject, layer)
    before = _read(layer)
    try:
        layer.crop(-1)
    except kvrack.UnsupportedOperation as error:
        _expect_states(layer, before, "as before a refused crop")
        expect(bool(error.remedy), "the refusal to name a remedy", repr(error.remedy))
        return
    changed = [not same_bits(now, old) for now, old in zip(_read(layer), before, strict=True)]
    expect(all(changed), "every state put back by crop(-1)", f"put back: {changed}")


@pytest.mark.rule("S6")
def test_reset_is_as_new(subject: Subject, layer: StateLayer) -> None:
    _fill(subject, layer)
    layer.reset()
    expect(layer.get_conv_state(0) is None and layer.get_recurrent_state(1) is None, "no state after reset()", "one")
    for index in STATES:
        new = _conv(subject, 6, batch=2, channels=8).to(torch.bfloat16)
        returned = layer.update_conv_state(new, index)
        expect(same_bits(returned[..., -6:], new), "new columns alone after reset()", "others")
        other = _recurrent(subject, batch=2, size=9)
        expect(same_bits(layer.update_recurrent_state(other, index), other), "another shape taken after reset()", "no")


@pytest.mark.rule("S7")
@pytest.mark.parametrize("way", ["deepcopy", "restore"])
def test_copies_bring_every_state(subject: Subject, layer: StateLayer, way: str) -> None:
    _fill(subject, layer)
    before = _read(layer)
    if way == "deepcopy":
        twin = copy.deepcopy(layer)
    else:
        twin = layer.twin()
        twin.restore(layer.storage(), layer.metadata())
    _expect_states(twin, before, f"after {way}")
    for index in STATES:
        expect_equal(twin.has_previous_state(index), True, f"has_previous_state({index}) after {way}")
        twin.update_conv_state(_conv(subject, 1, seed=44), index)
        twin.update_recurrent_state(_recurrent(subject, seed=44), index)
    _expect_states(layer, before, f"of the original, after its {way} was updated,")
