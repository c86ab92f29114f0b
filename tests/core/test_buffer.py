"""TokenBuffer against plain concatenation, and how much memory and moving that takes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrack import Placement, ShapeMismatch, TokenBuffer
from kvrack.buffer import MIN_ROOM, TOKENS

CPU = torch.device("cpu")


class RecordingPlacement(Placement):
    """A placement that keeps the books: what was allocated, and the most that lived at once."""

    def __init__(self) -> None:
        self.capacities: list[int] = []
        self.live = 0
        self.peak = 0

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        tensor = super().allocate(shape, dtype, device)
        nbytes = tensor.untyped_storage().nbytes()
        self.capacities.append(shape[TOKENS])
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(tensor, self._release, nbytes)
        return tensor

    def _release(self, nbytes: int) -> None:
        self.live -= nbytes


def tokens(count: int, first: int = 0, batch: int = 2, heads: int = 2, channels: int = 3) -> torch.Tensor:
    """Return states whose every number says which token it belongs to."""
    numbers = torch.arange(first, first + count, dtype=torch.float32).view(1, 1, count, 1)
    offsets = torch.arange(batch * heads * channels, dtype=torch.float32).view(batch, heads, 1, channels) / 64
    return numbers + offsets


def largest(held: int, growth: float) -> int:
    """Return the most capacity that holding `held` tokens may take."""
    return held + max(MIN_ROOM, math.ceil(held * (growth - 1)))


# --- what is held ---------------------------------------------------------------------------------

APPEND = st.tuples(st.just("append"), st.integers(0, 70), st.one_of(st.none(), st.integers(0, 40)))
OTHERS = st.tuples(st.sampled_from(["drop_newest", "keep_newest", "restore"]), st.integers(0, 80), st.none())


@given(
    steps=st.lists(st.one_of(APPEND, OTHERS), max_size=30),
    growth=st.sampled_from([1.01, 1.25, 2.0, 4.0]),
    limit=st.one_of(st.none(), st.integers(0, 100)),
)
def test_a_buffer_holds_and_returns_what_concatenation_would(steps, growth, limit):
    buffer = TokenBuffer(growth=growth, limit=limit)
    held, first = tokens(0), 0
    for operation, count, keep in steps:
        new = tokens(count, first)
        if operation == "append":
            everything = torch.cat([held, new], dim=TOKENS)
            assert torch.equal(buffer.append(new, keep), everything)
            held = everything if keep is None else everything[:, :, max(0, everything.shape[TOKENS] - keep) :]
            first += count
        elif operation == "drop_newest":
            buffer.drop_newest(count)
            held = held[:, :, : max(0, held.shape[TOKENS] - count)]
        elif operation == "keep_newest":
            buffer.keep_newest(count)
            held = held[:, :, max(0, held.shape[TOKENS] - count) :]
        else:
            buffer.restore(new)
            held = new
            first += count
        assert len(buffer) == held.shape[TOKENS]
        if buffer.data is not None:
            assert torch.equal(buffer.view(), held)
        else:
            assert len(buffer) == 0


@given(appends=st.lists(st.integers(1, 40), min_size=1, max_size=30), keep=st.integers(0, 30))
def test_a_windowed_buffer_holds_the_newest(appends, keep):
    buffer, everything = TokenBuffer(), tokens(0)
    for count in appends:
        new = tokens(count, everything.shape[TOKENS])
        before = everything[:, :, max(0, everything.shape[TOKENS] - keep) :]
        everything = torch.cat([everything, new], dim=TOKENS)
        assert torch.equal(buffer.append(new, keep), torch.cat([before, new], dim=TOKENS))
        assert torch.equal(buffer.view(), everything[:, :, max(0, everything.shape[TOKENS] - keep) :])


def test_a_new_buffer_is_empty():
    buffer = TokenBuffer()
    assert len(buffer) == 0
    assert buffer.view() is None


def test_clear_frees_the_memory_and_any_shape_may_follow():
    placement = RecordingPlacement()
    buffer = TokenBuffer(placement=placement)
    buffer.append(tokens(5))
    buffer.clear()
    assert placement.live == 0
    other = torch.ones(1, 4, 2, 6, dtype=torch.float64)
    assert torch.equal(buffer.append(other), other)


def test_what_is_given_is_copied():
    buffer, given_tokens = TokenBuffer(), tokens(3)
    buffer.append(given_tokens)
    buffer.restore(restored := tokens(4))
    given_tokens.zero_()
    restored.zero_()
    assert torch.equal(buffer.view(), tokens(4))


def test_restore_into_memory_that_fits_takes_no_other():
    placement = RecordingPlacement()
    buffer = TokenBuffer(placement=placement)
    buffer.append(tokens(10))
    address = buffer.data.data_ptr()
    buffer.restore(tokens(7, first=3))
    assert buffer.data.data_ptr() == address
    assert len(placement.capacities) == 1


@pytest.mark.parametrize("growth", [1.0, 0.5, float("nan")])
def test_a_growth_that_does_not_grow_is_refused(growth):
    with pytest.raises(ValueError, match=r"TokenBuffer\.growth: expected more than 1"):
        TokenBuffer(growth=growth)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (torch.zeros(2, 2, 3), "keys: expected [batch, heads, tokens, head_dim], got (2, 2, 3)"),
        (
            torch.zeros(3, 2, 1, 3),
            "keys: the cache holds batch 2, 2 heads, head_dim 3; got batch 3, 2 heads, head_dim 3. "
            "Call batch_repeat_interleave or batch_select_indices first, or reset()",
        ),
        (
            torch.zeros(2, 1, 1, 3),
            "keys: the cache holds batch 2, 2 heads, head_dim 3; got batch 2, 1 heads, head_dim 3. "
            "Call reset() to start anew",
        ),
        (
            torch.zeros(2, 2, 1, 5),
            "keys: the cache holds batch 2, 2 heads, head_dim 3; got batch 2, 2 heads, head_dim 5. "
            "Call reset() to start anew",
        ),
        (
            torch.zeros(2, 2, 1, 3, dtype=torch.bfloat16),
            "keys: the cache holds torch.float32 on cpu, got torch.bfloat16 on cpu. Call reset() to start anew",
        ),
        (
            torch.zeros(2, 2, 1, 3, device="meta"),
            "keys: the cache holds torch.float32 on cpu, got torch.float32 on meta. Call reset() to start anew",
        ),
    ],
)
def test_states_that_do_not_fit_are_refused(states, text):
    buffer = TokenBuffer()
    buffer.append(tokens(4))
    with pytest.raises(ShapeMismatch) as caught:
        buffer.check(states, "keys")
    assert str(caught.value) == text


def test_an_unallocated_buffer_accepts_any_four_dimensions():
    TokenBuffer().check(torch.zeros(7, 1, 2, 9), "keys")
    with pytest.raises(ShapeMismatch, match="expected"):
        TokenBuffer().check(torch.zeros(7), "keys")


# --- memory and moving ----------------------------------------------------------------------------


@given(
    appends=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    growth=st.sampled_from([1.05, 1.25, 2.0]),
)
def test_capacity_stays_within_the_growth_factor(appends, growth):
    buffer, held = TokenBuffer(growth=growth), 0
    for count in appends:
        buffer.append(tokens(count, held))
        held += count
        assert held <= buffer.data.shape[TOKENS] <= largest(held, growth)


@given(appends=st.lists(st.integers(1, 60), min_size=1, max_size=40), limit=st.integers(1, 400))
def test_no_room_is_made_beyond_the_limit_until_it_is_passed(appends, limit):
    buffer, held = TokenBuffer(limit=limit), 0
    for count in appends:
        buffer.append(tokens(count, held))
        held += count
        if held <= limit:
            assert buffer.data.shape[TOKENS] <= limit
        assert buffer.data.shape[TOKENS] <= largest(held, buffer.growth)


def test_allocate_makes_room_once_and_holds_no_token():
    placement = RecordingPlacement()
    buffer = TokenBuffer(placement=placement)
    buffer.allocate(2, 2, 3, torch.float32, CPU)
    buffer.allocate(4, 4, 4, torch.float16, CPU)
    assert placement.capacities == [MIN_ROOM]
    assert buffer.view().shape == (2, 2, 0, 3)
    buffer.append(tokens(3))
    assert placement.capacities == [MIN_ROOM]


@pytest.mark.parametrize("growth", [1.25, 1.5, 2.0])
def test_how_often_a_token_is_moved_does_not_depend_on_how_many_are_held(growth):
    placement = RecordingPlacement()
    buffer = TokenBuffer(growth=growth, placement=placement)
    for index in range(4096):
        buffer.append(tokens(1, index, batch=1, heads=1, channels=1))
    # Each allocation after the first moves what filled the one before it: n + n / growth + n / growth**2 + ...
    moved = sum(placement.capacities[:-1])
    assert 0 < moved <= 4096 * growth / (growth - 1)


def test_appending_within_capacity_returns_a_view_of_the_same_memory():
    buffer = TokenBuffer()
    buffer.append(tokens(4))
    address = buffer.data.data_ptr()
    for index in range(4, 12):
        assert buffer.append(tokens(1, index)).data_ptr() == address


@pytest.mark.parametrize("keep", [7, 100, 500])
def test_a_window_is_moved_once_in_a_while_and_not_at_every_token(keep):
    buffer = TokenBuffer(placement=(placement := RecordingPlacement()))
    moves, before = 0, 0
    appends = 4 * keep + 100
    for index in range(appends):
        buffer.append(tokens(1, index), keep)
        # A move is seen by where the window starts: appends alone only ever shift it towards the end.
        moves += buffer.start < before
        before = buffer.start
    room = largest(keep, buffer.growth) - keep
    assert 0 < moves <= appends / room
    assert max(placement.capacities) <= largest(keep, buffer.growth)


@given(
    appends=st.lists(st.integers(1, 200), min_size=1, max_size=30),
    keep=st.integers(0, 64),
    growth=st.sampled_from([1.05, 1.25, 2.0]),
)
def test_memory_of_a_window_is_bounded_whatever_passes_through(appends, keep, growth):
    buffer = TokenBuffer(growth=growth)
    for count in appends:
        buffer.append(tokens(count), keep)
        if buffer.data is not None:
            assert buffer.data.shape[TOKENS] <= largest(keep, growth)


def test_keep_newest_gives_back_memory_that_only_the_others_needed():
    placement = RecordingPlacement()
    buffer = TokenBuffer(placement=placement)
    buffer.append(tokens(1000))
    buffer.keep_newest(10)
    assert buffer.data.shape[TOKENS] <= largest(10, buffer.growth)
    assert placement.live == buffer.data.untyped_storage().nbytes()
    assert torch.equal(buffer.view(), tokens(1000)[:, :, -10:])


def test_growing_thirty_layers_one_token_at_a_time_peaks_under_1_35_of_what_is_held():
    placement = RecordingPlacement()
    buffers = [TokenBuffer(placement=placement) for _ in range(60)]
    for index in range(4096):
        new = tokens(1, index, batch=1, heads=1, channels=2)
        for buffer in buffers:
            buffer.append(new)
    held = sum(buffer.view().numel() * buffer.view().element_size() for buffer in buffers)
    assert placement.peak < 1.35 * held
    assert placement.live == sum(buffer.data.untyped_storage().nbytes() for buffer in buffers)


# --- autograd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [None, 5])
@pytest.mark.parametrize("first_length", [3, 40])
def test_memory_made_in_inference_mode_is_written_outside_it(keep, first_length):
    buffer = TokenBuffer()
    with torch.inference_mode():
        buffer.append(tokens(first_length), keep)
    with torch.no_grad():
        buffer.append(tokens(2, first_length), keep)
    buffer.append(tokens(30, first_length + 2), keep)
    with torch.inference_mode():
        buffer.append(tokens(1, first_length + 32), keep)
    everything = tokens(first_length + 33)
    assert torch.equal(buffer.view(), everything if keep is None else everything[:, :, -keep:])
    assert not buffer.data.is_inference()


@pytest.mark.parametrize("keep", [None, 4, 2])
def test_gradient_flows_through_the_new_tokens_and_what_is_held_is_constant(keep):
    buffer = TokenBuffer()
    first = tokens(3).requires_grad_()
    buffer.append(first, keep)
    assert not buffer.view().requires_grad
    second = tokens(2, 3).requires_grad_()
    result = buffer.append(second, keep)
    assert torch.equal(result, tokens(5)[:, :, 5 - result.shape[TOKENS] :])
    (result * result).sum().backward()
    assert torch.equal(second.grad, 2 * second.detach())
    assert first.grad is None
    assert not buffer.data.requires_grad


def test_backward_still_works_after_the_next_update():
    buffer = TokenBuffer()
    buffer.append(tokens(3))
    second = tokens(2, 3).requires_grad_()
    loss = buffer.append(second).square().sum()
    buffer.append(tokens(1, 5))
    loss.backward()
    assert torch.equal(second.grad, 2 * second.detach())
