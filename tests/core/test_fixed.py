"""Memory of a fixed size and address."""

from __future__ import annotations

import pytest
import torch

from kvrack.count import TokenCount
from kvrack.fixed import FixedBuffer, RingBuffer, view_size

CPU = torch.device("cpu")


def tokens(first: int, count: int) -> torch.Tensor:
    """Return tokens that are told apart by their number."""
    return torch.arange(first, first + count, dtype=torch.float32).reshape(1, 1, count, 1).expand(2, 3, count, 4)


def test_a_buffer_keeps_its_memory_for_what_fits_and_zeroes_it():
    buffer = FixedBuffer(8)
    buffer.allocate(2, 3, 4, torch.float32, CPU)
    assert torch.equal(buffer.view(0, 8), torch.zeros(2, 3, 8, 4))
    memory = buffer.data
    buffer.allocate_for(tokens(0, 5))
    assert buffer.data is memory
    buffer.allocate(1, 3, 4, torch.float32, CPU)
    assert buffer.data is not memory


@pytest.mark.parametrize("news", [[1] * 30, [3, 4, 1, 1, 1, 5, 1], [20, 1, 1], [5, 1], [4, 6, 1]], ids=str)
def test_a_ring_shows_any_part_of_its_newest_tokens_in_order(news):
    ring, count = RingBuffer(5), TokenCount()
    ring.allocate(2, 3, 4, torch.float32, CPU)
    count.allocate(CPU)
    for new in news:
        ring.write(tokens(count.value, new), count.value, count.position)
        count.advance(new)
        held = min(count.value, 5)
        for shown in range(1, held + 1):
            first = count.value - shown
            assert torch.equal(ring.view(first, shown), tokens(first, shown))


def test_a_ring_restores_what_view_returned():
    ring, position = RingBuffer(5), torch.tensor(0)
    ring.allocate(2, 3, 4, torch.float32, CPU)
    ring.write(tokens(0, 5), 0, position)
    for first in (5, 6, 7):
        ring.write(tokens(first, 1), first, position + first)
    other = RingBuffer(5)
    other.restore({"": ring.view(0, 5).clone()})
    assert torch.equal(other.view(3, 5), tokens(3, 5))


def test_the_count_is_an_int_and_a_tensor_of_the_same_number():
    count = TokenCount()
    assert count.value == 0
    count.advance(3)
    count.allocate(CPU)
    address = count.position.data_ptr()
    for change, expected in ((lambda: count.advance(4), 7), (lambda: count.set(2), 2), (lambda: count.advance(1), 3)):
        change()
        assert type(count.value) is int
        assert count.value == int(count.position) == expected
    assert count.position.data_ptr() == address


def test_a_view_holds_what_is_used_and_at_most_doubles_it():
    for used in range(1, 3000, 7):
        size = view_size(used, 3000)
        assert used <= size <= max(256, 2 * used)
        assert size == 3000 or size & (size - 1) == 0
