"""Update: what goes in and what comes back, as tokens and as tensors."""

from __future__ import annotations

import copy

import pytest
import torch

import kvrack
from kvrack_spec.compare import Unchanged, expect_close, expect_same, same_bits, see, tolerance
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.oracle import shown
from kvrack_spec.subject import DTYPES, Shape, Subject
from kvrack_spec.tags import read_tags, tagged, tokens_seen

UNEQUAL = [Shape(2, 2, 24, 16), Shape(2, 2, 16, 64, torch.bfloat16), Shape(1, 1, 192, 128)]
SINGLES = [(1,) * 12, (2, 1, 1), (55, 1, 1, 1)]
CHUNKS = [(1, 2, 55, 1), (2, 2, 2), (55, 55, 2, 1), (1, 55)]


@pytest.mark.rule("L2")
@pytest.mark.parametrize("head_dim", [16, 64])
def test_what_comes_back_has_the_form_of_what_was_given(subject: Subject, kind: str, head_dim: int) -> None:
    for dtype in DTYPES:
        for batch, heads in ((1, 1), (1, 3), (3, 1), (3, 3)):
            layer = subject.layer(kind)
            for new in (5, 1, 1):
                given = subject.states(new, Shape(batch, heads, head_dim, head_dim, dtype))
                for what, states, returned in zip(("keys", "values"), given, layer.update(*given), strict=True):
                    expect_equal(returned.dtype, states.dtype, f"dtype of returned {what}")
                    expect_equal(returned.device, states.device, f"device of returned {what}")
                    seen = (returned.shape[0], returned.shape[1], returned.shape[3])
                    expect_equal(seen, (batch, heads, head_dim), f"(batch, heads, head_dim) of returned {what}")


def _expect_all_tokens(subject: Subject, kind: str, shape: Shape, pattern: tuple[int, ...]) -> None:
    layer = subject.layer(kind)
    given = 0
    for new in pattern:
        seen = see(layer, *tagged(given, new, shape, subject.device))
        given += new
        count = len(tokens_seen(seen.keys))
        positions = shown(given, count, layer.capabilities.sinks)
        expected = [part[:, :, positions] for part in tagged(0, given, shape)]
        found = [read_tags(seen.keys), read_tags(seen.values)]
        if seen.any_order:
            found = [tags.sort(dim=-1).values for tags in found]
        for what, wanted, tags in zip(("keys", "values"), expected, found, strict=True):
            if torch.equal(tags, read_tags(wanted)):
                continue
            tokens = f"{count} of tokens 0 to {given - 1}, of each row and head, as {what} after {pattern}"
            broken(tokens, f"row 0, head 0: tokens {tokens_seen(seen.keys if what == 'keys' else seen.values)}")
        if not layer.is_sliding and layer.capabilities.window is None:
            expect_equal(count, given, "tokens that attention sees")


@pytest.mark.rule("L37")
@pytest.mark.parametrize("shape", [Shape(heads=1), Shape(heads=3, key_dim=64, value_dim=64)], ids=str)
def test_a_layer_takes_the_heads_that_arrive(subject: Subject, kind: str, shape: Shape) -> None:
    told = subject.layer(kind, kv_heads=8, key_head_dim=32, value_head_dim=32)
    untold = subject.layer(kind)
    for layer in (told, untold):
        try:
            subject.fill(layer, 9, 2, shape)
        except kvrack.ShapeMismatch as error:
            broken(f"{shape.heads} heads of {shape.key_dim} taken, whatever the layer's spec says", error)
    expect_equal(told.nbytes, untold.nbytes, "bytes of a layer whose spec says other heads")
    expect_same(told, untold, *subject.states(1, shape, seed=77))


@pytest.mark.rule("L3")
@pytest.mark.parametrize("pattern", SINGLES, ids=str)
def test_every_token_comes_back_in_order(
    subject: Subject, kind: str, any_shape: Shape, pattern: tuple[int, ...]
) -> None:
    _expect_all_tokens(subject, kind, any_shape, pattern)


@pytest.mark.rule("L33", "B4")
@pytest.mark.capability("chunked_prefill")
@pytest.mark.parametrize("pattern", CHUNKS, ids=str)
@pytest.mark.parametrize("shape", [Shape(), Shape(1, 1, 64, 64, torch.bfloat16)], ids=str)
def test_several_tokens_on_a_filled_layer(subject: Subject, kind: str, shape: Shape, pattern: tuple[int, ...]) -> None:
    _expect_all_tokens(subject, kind, shape, pattern)


@pytest.mark.rule("L34", "B4")
@pytest.mark.capability("unequal_head_dim")
@pytest.mark.parametrize("pattern", SINGLES, ids=str)
@pytest.mark.parametrize("shape", UNEQUAL, ids=str)
def test_head_dims_may_differ(subject: Subject, kind: str, shape: Shape, pattern: tuple[int, ...]) -> None:
    _expect_all_tokens(subject, kind, shape, pattern)


MISFITS = {
    "batch": Shape(batch=2),
    "heads": Shape(heads=1),
    "head_dim": Shape(key_dim=32, value_dim=32),
    "dtype": Shape(dtype=torch.float16),
}


@pytest.mark.rule("L4")
def test_misfits_are_refused_before_anything_is_written(subject: Subject, kind: str) -> None:
    for misfit in (*MISFITS, "dimensions", "pair"):
        layer = subject.filled(kind)
        if misfit == "dimensions":
            keys, values = (states[0] for states in subject.states(1))
        elif misfit == "pair":
            keys, values = subject.states(2)[0], subject.states(1)[1]
        else:
            keys, values = subject.states(1, MISFITS[misfit])
        what = f"an update of misfitting {misfit}"
        with Unchanged(layer, what):
            try:
                layer.update(keys, values)
            except kvrack.ShapeMismatch:
                continue
            except Exception as error:
                broken(f"ShapeMismatch for {what}", f"{type(error).__name__}: {error}")
            broken(f"ShapeMismatch for {what}", "no error")


@pytest.mark.rule("L10")
def test_states_given_are_copied_and_not_written(subject: Subject, kind: str) -> None:
    layer, twin = subject.layer(kind), subject.layer(kind)
    for new in (5, 1):
        keys, values = subject.states(new)
        given = keys.clone(), values.clone()
        layer.update(keys, values)
        for what, states, before in zip(("keys", "values"), (keys, values), given, strict=True):
            expect(same_bits(states, before), f"update to leave the {what} given as they are", "they were written")
        twin.update(*given)
        keys.fill_(77.0)
        values.fill_(77.0)
    keys, values = subject.states(1, seed=5)
    seen, wanted = see(layer, keys, values), see(twin, keys, values)
    allowed = tolerance(layer, keys.dtype)
    expect_close(seen.keys, wanted.keys, allowed, "keys, after the tensors given were overwritten,")
    expect_close(seen.values, wanted.values, allowed, "values, after the tensors given were overwritten,")


@pytest.mark.rule("L11")
def test_returned_tensors_stay_valid_until_the_next_update(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind)
    returned = layer.update(*subject.states(1, seed=7))
    before = [tensor.clone() for tensor in returned]
    layer.get_seq_length(), layer.get_mask_sizes(3), layer.storage(), layer.metadata()
    assert layer.keys is not None
    assert layer.values is not None
    copy.deepcopy(layer).update(*subject.states(1, seed=8))
    for tensor, kept in zip(returned, before, strict=True):
        expect(same_bits(tensor, kept), "returned tensors to stay as they are while the layer is read", "they changed")


@pytest.mark.rule("L11")
def test_tensors_that_other_layers_read_stay_valid_through_the_step(subject: Subject) -> None:
    spec = kvrack.LayerSpec(read_by_others=True)
    cache = subject.cache(spec, spec, kvrack.LayerSpec())
    for step in range(3):
        returned = [cache.update(*subject.states(1 if step else 40, seed=10 * step + i), i) for i in range(1)]
        before = [tensor.clone() for pair in returned for tensor in pair]
        for index in (1, 2):
            cache.update(*subject.states(1 if step else 40, seed=10 * step + index), index)
        for tensor, kept in zip([t for pair in returned for t in pair], before, strict=True):
            expect(same_bits(tensor, kept), "what layer 0 returned to stay through the step", "it changed")


@pytest.mark.rule("L26")
def test_what_is_held_is_constant_to_autograd(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    with torch.enable_grad():
        for new in (5, 1, 1):
            keys, values = (states.requires_grad_() for states in subject.states(new, seed=new))
            returned = layer.update(keys, values)
            for name, tensor in layer.storage().items():
                expect(not tensor.requires_grad, f"storage()[{name!r}] detached", "it requires grad")
        if layer.capabilities.lossless:
            for what, states, answer in zip(("keys", "values"), (keys, values), returned, strict=True):
                expect(answer.requires_grad, f"gradient through the {what} of this update", "requires_grad is False")
                (gradient,) = torch.autograd.grad(answer.sum(), states, retain_graph=True)
                seen = gradient.flatten()[:4].tolist()
                expect(bool((gradient == 1).all()), f"gradient of 1 through the new {what}", seen)


@pytest.mark.rule("L27")
@pytest.mark.parametrize("first", [True, False], ids=["inference-first", "inference-later"])
def test_inference_mode_may_change_between_updates(subject: Subject, kind: str, first: bool) -> None:
    layer, twin = subject.layer(kind), subject.layer(kind)
    for step, mode in enumerate((first, not first, first)):
        states = subject.states(1 if step else 9, seed=step)
        with torch.inference_mode(mode):
            layer.update(*states)
        twin.update(*states)
    expect_same(layer, twin, *subject.states(1, seed=9))


@pytest.mark.rule("L28")
def test_keys_and_values_read_what_is_held(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    expect(
        layer.keys is None and layer.values is None, "keys and values None before the first update", "something else"
    )
    for new in (7, 1):
        given = subject.states(new, seed=new)
        layer.update(*given)
        for what, held, newest in zip(("keys", "values"), (layer.keys, layer.values), given, strict=True):
            if held is None:
                broken(f"{what} of a layer that holds tokens to be readable", "None")
            expect_equal(held.dtype, newest.dtype, f"dtype of {what}")
            length = layer.get_seq_length()
            if layer.is_compileable and layer.is_sliding and length > held.shape[2]:
                continue  # a ring: any order
            held = held[:, :, : min(length, held.shape[2])]
            expect_close(held[:, :, -1:], newest[:, :, -1:], tolerance(layer, newest.dtype, 2.0), f"newest of {what}")
