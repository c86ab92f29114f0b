"""State layers: convolution inputs and recurrent states of fixed size."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import kvrack
from kvrack.layer import AttentionLayer, StateLayer
from kvrack.model import LayerSpec, StateShape
from kvrack_spec.compare import expect_same, same_bits
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.session import DECLINED
from kvrack_spec.subject import Shape, Subject

KERNEL = 4
CONV = ((40, KERNEL), (24, 7))
RECURRENT = (2, 8, 16)
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
@pytest.mark.parametrize(("first", "kernel"), [(KERNEL, None), (9, KERNEL), (2, KERNEL)])
def test_conv_state_holds_the_newest_columns(
    subject: Subject, layer: StateLayer, first: int, kernel: int | None
) -> None:
    for index in STATES:
        expect(layer.get_conv_state(index) is None, "get_conv_state None before the first update", "a state")
        everything = torch.empty(0)
        for step, columns in enumerate((first, 1, 1, 2)):
            new = _conv(subject, columns, seed=step + 10 * index)
            returned = layer.update_conv_state(new, index, kernel)
            if step == 0:
                everything = torch.nn.functional.pad(new, (KERNEL, 0))
                wanted = everything[..., -max(columns, KERNEL) :]
            else:
                everything = torch.cat([everything, new], dim=-1)
                wanted = everything[..., -columns - KERNEL :]
            expect(same_bits(returned, wanted), "the columns held before, then the new ones, returned", "others")
            held = layer.get_conv_state(index)
            if held is None:
                broken("get_conv_state after an update", None)
            expect(same_bits(held, everything[..., -KERNEL:]), f"the newest {KERNEL} columns held", "others")


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


@pytest.mark.rule("S8")
def test_conv_states_go_back_by_tokens(subject: Subject, layer: StateLayer) -> None:
    if not layer.capabilities.records_past:
        pytest.skip(f"{DECLINED}records_past")
    layer.activate_past_recording()
    given: list[list[torch.Tensor]] = [[], []]
    for step, columns in enumerate((2, 5, 1, 1)):
        for index in STATES:
            given[index].append(_conv(subject, columns, seed=step + 10 * index))
            layer.update_conv_state(given[index][-1], index, KERNEL)
    for tokens in (1, 3, 8):
        cropped = copy.deepcopy(layer)
        expect(cropped.is_croppable, "is_croppable of recorded convolution states", False)
        cropped.crop(-tokens)
        for index in STATES:
            held = cropped.get_conv_state(index)
            everything = torch.nn.functional.pad(torch.cat(given[index], dim=-1), (KERNEL, 0))
            wanted = everything[..., :-tokens][..., -KERNEL:]
            expect(held is not None and same_bits(held, wanted), f"the columns before the last {tokens}", "others")
    layer.crop(-9)
    expect_equal(layer.has_previous_state(), False, "has_previous_state() after every token was removed")


@pytest.mark.rule("S9")
def test_recurrent_states_go_back_to_a_forward_or_nowhere(subject: Subject, layer: StateLayer) -> None:
    if not layer.capabilities.records_past:
        pytest.skip(f"{DECLINED}records_past")
    layer.activate_past_recording()
    before = {}
    for step, columns in enumerate((5, 1, 2)):
        before[sum((5, 1, 2)[step:])] = None if step == 0 else _read(layer)
        for index in STATES:
            layer.update_conv_state(_conv(subject, columns, seed=step + 10 * index), index, KERNEL)
            layer.update_recurrent_state(_recurrent(subject, seed=step + 10 * index), index)
    now = _read(layer)
    moved = []
    for tokens in range(1, 8):
        cropped = copy.deepcopy(layer)
        try:
            cropped.crop(-tokens)
        except kvrack.UnsupportedOperation as error:
            expect("records_past" in str(error), "the refusal to name records_past", str(error))
            _expect_states(cropped, now, "as before a refused crop")
            continue
        wanted = before.get(tokens)
        expect(wanted is not None, "crop to the middle of a forward to be refused", f"crop(-{tokens}) done")
        _expect_states(cropped, wanted or [], f"as before the forward that began {tokens} tokens ago")
        moved.append(tokens)
    expect(2 in moved, "crop(-2) to put back the states before the last forward", "refused")


@pytest.mark.rule("S10")
def test_what_a_model_writes_in_place_is_the_state(subject: Subject, layer: StateLayer) -> None:
    _fill(subject, layer)
    twin = copy.deepcopy(layer)
    written = []
    for number, (read, index) in enumerate(
        (read, index) for read in (layer.get_conv_state, layer.get_recurrent_state) for index in STATES
    ):
        state = read(index)
        if state is None:
            broken("a state after an update", None)
        written.append(torch.full_like(state, float(number)))
        state.copy_(written[-1])
    _expect_states(layer, written, "as the model wrote it in place")
    _expect_states(copy.deepcopy(layer), written, "in a copy, as the model wrote it in place")
    layer.reorder_cache(torch.tensor([0, 1, 2], device=subject.device))
    _expect_states(layer, written, "after reorder_cache, as the model wrote it in place")
    if any(same_bits(left, right) for left, right in zip(_read(twin), written, strict=True)):
        broken("a copy made before to keep its own states", "the written ones")


@pytest.mark.rule("S11")
def test_states_keep_their_address(subject: Subject, layer: StateLayer) -> None:
    if not layer.capabilities.stable_address:
        pytest.skip(f"{DECLINED}stable_address")
    _fill(subject, layer)
    first = {name: tensor.data_ptr() for name, tensor in layer.storage().items()}
    _fill(subject, layer)
    layer.reorder_cache(torch.tensor([2, 0, 1], device=subject.device))
    seen = {name: tensor.data_ptr() for name, tensor in layer.storage().items()}
    expect_equal(seen, first, "addresses after further updates and reorder_cache")


def _hybrid(subject: Subject) -> kvrack.Cache:
    cache = subject.cache(LayerSpec(states=len(STATES)))
    layer = cache.layers[0]
    kept = isinstance(layer, AttentionLayer), isinstance(layer, StateLayer)
    expect_equal(kept, (True, True), "a layer that attends and has states, (AttentionLayer, StateLayer)")
    return cache


def _parts(cache: kvrack.Cache) -> tuple[AttentionLayer, StateLayer]:
    layer = cache.layers[0]
    assert isinstance(layer, AttentionLayer)
    assert isinstance(layer, StateLayer)
    return layer, layer


@pytest.mark.rule("S12")
@pytest.mark.parametrize("operation", ["batch", "copies", "reset", "refused crop"])
def test_a_layer_with_attention_and_states_acts_on_both(
    subject: Subject, layer: StateLayer, operation: str, tmp_path: Path
) -> None:
    cache, alone = _hybrid(subject), subject.layer()
    attention, states = _parts(cache)
    for new in (9, 1):
        expect_same(attention, alone, *subject.states(new, seed=new))
    _fill(subject, states)
    _fill(subject, layer)
    rows = torch.tensor([2, 0], device=subject.device)
    if operation == "batch":
        for each in (states, alone, layer):
            each.batch_repeat_interleave(2)
            each.reorder_cache(torch.tensor([5, 1, 0, 4, 2, 3], device=subject.device))
            each.batch_select_indices(rows)
    elif operation == "copies":
        cache.offload(0)
        copy.deepcopy(cache).save(tmp_path / "cache.safetensors")
        cache = kvrack.load(tmp_path / "cache.safetensors")
        if subject.device != "cpu":
            cache.layers[0].to(subject.device)
    elif operation == "reset":
        for each in (states, alone, layer):
            each.reset()
        _fill(subject, states)
        _fill(subject, layer)
    elif operation == "refused crop":
        with contextlib.suppress(kvrack.UnsupportedOperation):
            cache.crop(-1)
            alone.crop(-1)
    attention, states = _parts(cache)
    if operation != "refused crop" or attention.get_seq_length() == alone.get_seq_length():
        _expect_states(states, _read(layer), f"of a layer with attention, after {operation}")
    shape = Shape(batch=2 if operation == "batch" else 3)
    expect_same(attention, alone, *subject.states(1, shape, seed=44))


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


@pytest.mark.rule("C8")
def test_memory_of_states_is_predicted(subject: Subject, layer: StateLayer) -> None:
    shape = Shape(batch=2, dtype=torch.bfloat16)
    shapes = (StateShape(CONV[0], RECURRENT, "float32"), StateShape(CONV[1]))
    spec = LayerSpec(
        kv_heads=shape.heads, key_head_dim=shape.key_dim, value_head_dim=shape.value_dim, states=2, state_shapes=shapes
    )
    model = kvrack.ModelSpec(layers=(replace(spec, attention=None), spec))
    cache = kvrack.create_cache(subject.name, model, 300, **subject.settings)
    for new in (299, 1):
        for index in range(2):
            for state, (channels, columns) in enumerate(CONV):
                conv = torch.zeros(2, channels, new, dtype=shape.dtype, device=subject.device)
                cache.update_conv_state(conv, index, state, columns)
            cache.update_recurrent_state(torch.zeros(2, *RECURRENT, device=subject.device), index)
        cache.update(*subject.states(new, shape), 1)
    predicted = kvrack.predict_memory(subject.name, model, 300, shape.batch, shape.dtype, **subject.settings)
    expect_equal(predicted.unknown, (), "layers of unknown bytes")
    expect(
        abs(predicted.nbytes - cache.nbytes) <= 0.03 * cache.nbytes,
        f"{cache.nbytes} bytes predicted, within 3%, as the cache holds",
        predicted.nbytes,
    )
