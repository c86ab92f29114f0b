"""Lengths, windows and mask sizes."""

from __future__ import annotations

import pytest

from kvrack_spec.compare import Unchanged, expect_matching, oracle_of, see, tolerance
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.oracle import shown
from kvrack_spec.subject import WINDOW, Shape, Subject
from kvrack_spec.tags import tagged, tokens_seen

MOST_GIVEN = 4096
"""Tokens at most that a layer is given to pass the window that it declares."""

PREFILLS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 55)


@pytest.mark.rule("L5")
@pytest.mark.parametrize("prefill", PREFILLS)
def test_length_is_an_int_that_counts_every_token(subject: Subject, kind: str, prefill: int) -> None:
    layer = subject.layer(kind)
    expect(type(layer.get_seq_length()) is int, "get_seq_length() to be an int", type(layer.get_seq_length()).__name__)
    given = 0
    for new in (prefill, *[1] * (WINDOW + 2)):
        layer.update(*subject.states(new))
        given += new
        length = layer.get_seq_length()
        expect(type(length) is int, "get_seq_length() to be an int", type(length).__name__)
        expect_equal(length, given, "get_seq_length()")


def _expect_mask_sizes(subject: Subject, kind: str, pattern: tuple[int, ...]) -> None:
    layer = subject.layer(kind)
    given = 0
    for new in pattern:
        with Unchanged(layer, "get_mask_sizes"):
            sizes = layer.get_mask_sizes(new)
        expect(
            type(sizes) is tuple and [type(size) for size in sizes] == [int, int],
            "get_mask_sizes to return two ints",
            repr(sizes),
        )
        length, offset = sizes
        keys, _ = layer.update(*tagged(given, new, Shape(), subject.device))
        given += new
        when = f"of get_mask_sizes({new}) with {given - new} tokens seen"
        expect_equal(length, keys.shape[2], f"length {when}, as the update returns,")
        expect(offset >= 0, f"offset {when} of 0 or more", offset)
        used = min(length, given - offset)
        expect(
            used == length or layer.is_compileable, f"no unused slots, by the offset {when}", f"{length - used} slots"
        )
        tokens = tokens_seen(keys[:, :, :used])
        if layer.is_compileable and layer.is_sliding:
            tokens = sorted(tokens)
        expected = shown(offset + used, used, layer.capabilities.sinks)
        expect_equal(tokens, expected, f"tokens of the slots, by the offset {offset} {when},")
        expect_equal(tokens[-1], given - 1, f"newest token in the slots {when}")


@pytest.mark.rule("L6")
@pytest.mark.parametrize("prefill", PREFILLS)
def test_mask_sizes_foretell_the_update(subject: Subject, kind: str, prefill: int) -> None:
    _expect_mask_sizes(subject, kind, (prefill, *[1] * (WINDOW + 2)))


@pytest.mark.rule("L6")
@pytest.mark.capability("chunked_prefill")
@pytest.mark.parametrize("pattern", [(3, 2, 2, 2), (9, 4, 1), (2, 55, 1)], ids=str)
def test_mask_sizes_foretell_an_update_of_several(subject: Subject, kind: str, pattern: tuple[int, ...]) -> None:
    _expect_mask_sizes(subject, kind, pattern)


@pytest.mark.rule("L7", "B4")
@pytest.mark.parametrize("window", [1, 2, WINDOW])
@pytest.mark.parametrize("over", [-1, 0, 1, 40])
def test_a_window_shows_what_it_should(subject: Subject, windowed: str, window: int, over: int) -> None:
    layer = subject.layer(windowed, window=window)
    given = 0
    for new in (max(1, window + over), *[1] * 8):
        seen = see(layer, *tagged(given, new, Shape(), subject.device))
        given += new
        first = max(0, given - (window - 1 + new))
        tokens = tokens_seen(seen.keys)
        if seen.any_order:
            tokens = sorted(tokens)
        expect_equal(tokens, list(range(first, given)), f"tokens with window {window}, after an update of {new},")


@pytest.mark.rule("B4")
@pytest.mark.capability("slides")
def test_sliding_layers_are_built_and_hold_a_window(subject: Subject) -> None:
    _expect_window_held(subject, "sliding")


@pytest.mark.rule("B4")
@pytest.mark.capability("chunks")
def test_chunked_layers_are_built_and_hold_a_window(subject: Subject) -> None:
    _expect_window_held(subject, "chunked")


def _expect_window_held(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    expect(layer.is_sliding, f"is_sliding of a {kind} layer", False)
    subject.fill(layer, 55, 40)
    first = layer.nbytes
    subject.fill(layer, 0, 100)
    expect(layer.nbytes <= 2 * first, f"memory bounded by the window: about {first} bytes", f"{layer.nbytes} bytes")


@pytest.mark.rule("L8")
def test_max_length_is_a_capacity_or_none(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    most = layer.get_max_length()
    expect(type(most) is int, "get_max_length() to be an int", type(most).__name__)
    if layer.capabilities.grows:
        expect_equal(most, -1, "get_max_length() of a layer that grows")
    elif not layer.is_sliding:
        expect(most > 0, "get_max_length() of a layer that doesn't grow to be its capacity", most)
    subject.fill(layer, 9, 2)
    if layer.get_max_length() != most:
        broken(f"get_max_length() to stay {most}", layer.get_max_length())


@pytest.mark.rule("L36")
@pytest.mark.parametrize("passed", [-1, 0, 1, 5])
@pytest.mark.parametrize("new", [1, 3])
def test_a_full_layer_shows_as_many_tokens_as_declared(subject: Subject, passed: int, new: int) -> None:
    declared = subject.capabilities()
    if new > 1 and not declared.chunked_prefill:
        pytest.skip("declined: chunked_prefill")
    if declared.window is None:
        pytest.skip("no window is declared: L3 says that every token is shown")
    given = min(MOST_GIVEN, max(1, declared.sinks + declared.window - 1 + passed))
    layer = subject.layer(max_length=given + new)
    oracle = oracle_of(layer)
    for step, tokens in enumerate((given, new)):
        states = subject.states(tokens, seed=step)
        wanted = oracle.update(*states)
        seen = see(layer, *states)
    expect_equal(seen.keys.shape[2], wanted[0].shape[2], f"tokens that attention sees of {given}, {new} more coming:")
    scales = oracle.key_scale, oracle.value_scale
    expect_matching(seen, *wanted, tolerance(layer, states[0].dtype), *scales)
