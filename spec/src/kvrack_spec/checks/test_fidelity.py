"""Fidelity: the values that come back."""

from __future__ import annotations

import pytest
import torch

import kvrack
from kvrack_spec.compare import Seen, expect_close, expect_matching, oracle_of, same_bits, see, tolerance
from kvrack_spec.expect import expect, expect_equal
from kvrack_spec.oracle import shown
from kvrack_spec.subject import DTYPES, Shape, Subject

PATTERNS = [(1,) * 9, (2, 1, 1), (55, *[1] * 90)]
INPUTS = ("random", "one channel at 30x")


def _states(subject: Subject, what: str, new: int, shape: Shape, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = subject.states(new, shape, seed)
    if what == "zeros":
        return torch.zeros_like(keys), torch.zeros_like(values)
    if what == "one row of zeros":
        keys[-1], values[-1] = 0, 0
    elif what == "constants":
        keys.fill_(0.37)
        values.fill_(-5.0)
    elif what == "one channel at 30x":
        keys[..., 3] = keys[..., 3] + 30
        values[..., 3] = values[..., 3] * 30
    elif what == "small numbers":
        smallest = torch.finfo(shape.dtype).tiny
        keys, values = keys.sign() * smallest, values.sign() * smallest
    elif what == "large numbers":
        keys, values = keys.clamp(-1, 1) * 30000, values.clamp(-1, 1) * 30000
    return keys, values


def _expect_values(subject: Subject, kind: str, shape: Shape, pattern: tuple[int, ...], what: str) -> None:
    layer = subject.layer(kind)
    oracle = oracle_of(layer)
    allowed = tolerance(layer, shape.dtype)
    for step, new in enumerate(pattern):
        keys, values = _states(subject, what, new, shape, step)
        oracle.update(keys, values)
        seen = see(layer, keys, values)
        # How many tokens are seen is L7's; that they are the newest, unharmed, is ours.
        count = seen.keys.shape[2]
        expect_matching(seen, *oracle.shown(count), allowed, oracle.key_scale, oracle.value_scale)


@pytest.mark.rule("F1", "B4")
@pytest.mark.capability("lossless")
@pytest.mark.parametrize("what", INPUTS)
def test_lossless_is_bit_identical(subject: Subject, kind: str, any_shape: Shape, what: str) -> None:
    for pattern in PATTERNS:
        _expect_values(subject, kind, any_shape, pattern, what)


@pytest.mark.rule("F2")
@pytest.mark.parametrize("what", INPUTS)
def test_lossy_is_within_its_bound(subject: Subject, kind: str, any_shape: Shape, what: str) -> None:
    if subject.capabilities(kind).lossless:
        pytest.skip("lossless is promised: F1 says more")
    for pattern in PATTERNS:
        _expect_values(subject, kind, any_shape, pattern, what)


@pytest.mark.rule("F3")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_becomes_nan_and_zeros_stay(subject: Subject, kind: str, dtype: torch.dtype) -> None:
    for what in ("zeros", "one row of zeros", "constants", "small numbers", "large numbers", *INPUTS):
        layer = subject.layer(kind)
        for step, new in enumerate((5, *[1] * 140)):
            seen = see(layer, *_states(subject, what, new, Shape(dtype=dtype), step))
        for name, states in (("keys", seen.keys), ("values", seen.values)):
            finite = bool(states.isfinite().all())
            expect(finite, f"finite {name} from {what}", f"{(~states.isfinite()).sum()} that aren't")
            if "zeros" in what:
                zeros = states if what == "zeros" else states[-1]
                expect(bool((zeros == 0).all()), f"exact zeros among {name}", f"up to {zeros.abs().max()}")


class Changes:
    """How often each token was returned with other bits than the time before."""

    def __init__(self, tokens: int) -> None:
        self.last: torch.Tensor | None = None
        self.tokens = tokens
        self.known = torch.zeros(tokens, dtype=torch.bool)
        self.counts = torch.zeros(tokens, dtype=torch.long)

    def add(self, states: torch.Tensor, positions: list[int]) -> tuple[int, int]:
        """Take in what was returned for these positions; return the token changed most, and how often."""
        if self.last is None:
            self.last = states.new_zeros(*states.shape[:2], self.tokens, states.shape[3])
        index = torch.tensor(positions)
        differs = (states != self.last[:, :, index]).any(-1).any(0).any(0).cpu()
        self.counts[index] += differs & self.known[index]
        self.known[index] = True
        self.last[:, :, index] = states
        worst = int(self.counts.argmax())
        return worst, int(self.counts[worst])


CODED = ("keys.", "values.")
"""How the names in `storage()` start of what keys and values are encoded into."""

TAIL = "tail"
"""What the part of a buffer that isn't encoded yet is called in `storage()`."""


@pytest.mark.rule("F4")
def test_a_token_is_encoded_once(subject: Subject) -> None:
    layer = subject.layer()
    shape, pattern = Shape(2, 1), (55, *[1] * 420)
    # Keys and values apart: their codecs may wait for blocks of different sizes.
    changes = {what: Changes(sum(pattern)) for what in ("keys", "values")}
    held: dict[str, torch.Tensor] = {}
    for step, new in enumerate(pattern):
        keys, values = subject.states(new, shape, seed=step)
        growing = 1 + step / 100
        seen = see(layer, keys * growing, values * growing)
        positions = shown(seen.length, seen.keys.shape[2], layer.capabilities.sinks)
        for what, states in (("keys", seen.keys), ("values", seen.values)):
            worst, changed = changes[what].add(states, positions)
            expect(changed <= 1, f"the {what} of a token to change at most once", f"token {worst} changed {changed}x")
        if step % 20 == 0:
            held = _expect_codes_kept(layer.storage(), held)


def _expect_codes_kept(storage: dict[str, torch.Tensor], held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, old in held.items():
        now = storage[name][:, :, : old.shape[2]]
        expect(same_bits(now, old), f"storage()[{name!r}] of tokens encoded before to stay", "it was rewritten")
    codes = {
        name: tensor for name, tensor in storage.items() if name.startswith(CODED) and not name.endswith(f".{TAIL}")
    }
    return {name: tensor.clone() for name, tensor in codes.items() if tensor.dim() > 2}


@pytest.mark.rule("F5")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("times", [10.0, 100.0])
def test_values_that_grow_later_keep_their_size(subject: Subject, kind: str, dtype: torch.dtype, times: float) -> None:
    layer = subject.layer(kind)
    oracle = oracle_of(layer)
    shape = Shape(dtype=dtype)
    for step, new in enumerate((9, *[1] * 145)):
        keys, values = subject.states(new, shape, seed=step)
        if step:
            keys, values = keys * times, values * times
        oracle.update(keys, values)
        seen = see(layer, keys, values)
    allowed = max(0.5, tolerance(layer, dtype))
    count = min(140, seen.keys.shape[2])
    shown_last = oracle.shown(seen.keys.shape[2])
    for what, states, wanted in zip(("keys", "values"), (seen.keys, seen.values), shown_last, strict=True):
        if seen.any_order:
            states, wanted = states.norm(dim=-1, keepdim=True).sort(2).values, wanted[:, :, -count:]
            wanted = wanted.norm(dim=-1, keepdim=True).sort(2).values
        grown = f"{what} that are {times:g}x those before"
        # Half of the magnitude tells clipped from coarse; how coarse is F2's.
        expect_close(states[:, :, -count:], wanted[:, :, -count:], allowed, grown)


@pytest.mark.rule("F6")
def test_the_newest_tokens_are_exact(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    exact = getattr(layer.config, "residual_length", 0)
    if not exact:
        pytest.skip("the config has no residual_length")
    oracle = oracle_of(layer)
    for step, new in enumerate((55, *[1] * 200)):
        keys, values = subject.states(new, seed=step)
        wanted = oracle.update(keys, values)
        seen = see(layer, keys, values)
        count = min(exact, seen.keys.shape[2])
        for what, states, given in zip(("keys", "values"), (seen.keys, seen.values), wanted, strict=True):
            expect_close(states[:, :, -count:], given[:, :, -count:], 0.0, f"the newest {count} {what}")


@pytest.mark.rule("F8")
def test_the_first_tokens_are_exact(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    exact = getattr(layer.config, "sink_tokens", 0)
    if not exact:
        pytest.skip("the config has no sink_tokens")
    oracle = oracle_of(layer)
    for step, new in enumerate((3, 55, *[1] * 200)):
        keys, values = subject.states(new, seed=step)
        wanted = oracle.update(keys, values)
        seen = see(layer, keys, values)
        positions = shown(seen.length, seen.keys.shape[2], layer.capabilities.sinks)
        first = [slot for slot, position in enumerate(positions) if position < exact]
        for what, states, given in zip(("keys", "values"), (seen.keys, seen.values), wanted, strict=True):
            given = given[:, :, -seen.keys.shape[2] :]
            expect_close(states[:, :, first], given[:, :, first], 0.0, f"the first {exact} {what}")


@pytest.mark.rule("F7")
@pytest.mark.parametrize("fill", [(9, 3), (140, 9)], ids=str)
def test_a_row_does_not_depend_on_the_others(subject: Subject, kind: str, fill: tuple[int, int]) -> None:
    together = subject.layer(kind)
    alone = [subject.layer(kind) for _ in range(3)]
    magnitude = torch.tensor([1.0, 8.0, 64.0], device=subject.device).view(-1, 1, 1, 1)
    for step, new in enumerate((fill[0], *[1] * fill[1])):
        keys, values = (states * magnitude for states in subject.states(new, seed=step))
        seen = see(together, keys, values)
        rows = [see(layer, keys[i : i + 1], values[i : i + 1]) for i, layer in enumerate(alone)]
    allowed = tolerance(together, keys.dtype, 2.0)
    for i, row in enumerate(rows):
        part = Seen(seen.keys[i : i + 1], seen.values[i : i + 1], seen.length, seen.any_order)
        expect_matching(part, row.keys, row.values, allowed)


@pytest.mark.rule("F2")
def test_the_bound_is_declared(subject: Subject, kind: str) -> None:
    declared = subject.capabilities(kind)
    expect_equal(declared.lossless, declared.relative_error == 0.0, "lossless exactly with relative_error 0.0:")
    expect(isinstance(declared, kvrack.backend.Capabilities), "Capabilities", type(declared).__name__)
