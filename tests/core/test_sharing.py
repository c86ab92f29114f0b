"""Forks share memory: each goes on as if it were alone, and nothing is copied before it must be."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import kvrack
from kvrack import LayerSpec, ModelSpec, TokenBuffer
from kvrack.buffer import TOKENS
from kvrack.count import TokenCount
from kvrack.fixed import FixedBuffer, RingBuffer

CPU = torch.device("cpu")


class Allocated(TorchDispatchMode):
    """Counts the elements of every tensor made while active that is no view of another."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in given:
            self.elements += out.numel()
        return out


def tokens(count: int, first: int = 0) -> torch.Tensor:
    """Return states whose every number says which token it belongs to."""
    return torch.arange(first, first + count, dtype=torch.float32).view(1, 1, count, 1).expand(2, 2, count, 3)


# --- buffers that grow ----------------------------------------------------------------------------

STEP = st.tuples(
    st.sampled_from(["append", "append", "append", "slide", "drop_newest", "keep_newest", "restore", "fork", "die"]),
    st.integers(0, 4),
    st.integers(0, 40),
)


@given(steps=st.lists(STEP, max_size=40), growth=st.sampled_from([1.01, 1.25, 4.0]))
def test_a_family_of_forks_holds_what_each_alone_would(steps, growth):
    family = [(TokenBuffer(growth=growth), tokens(0))]
    family[0][0].allocate(2, 2, 3, torch.float32, CPU)
    first = 0
    for operation, which, count in steps:
        index = which % len(family)
        buffer, held = family[index]
        new = tokens(count, first)
        first += count
        if operation in ("append", "slide"):
            keep = 12 if operation == "slide" else None
            held = torch.cat([held, new], dim=TOKENS)
            assert torch.equal(buffer.append(new, keep), held)
            held = held if keep is None else held[:, :, max(0, held.shape[TOKENS] - keep) :]
        elif operation == "drop_newest":
            buffer.drop_newest(count)
            held = held[:, :, : max(0, held.shape[TOKENS] - count)]
        elif operation == "keep_newest":
            buffer.keep_newest(count)
            held = held[:, :, max(0, held.shape[TOKENS] - count) :]
        elif operation == "restore":
            buffer.restore(new)
            held = new
        elif operation == "fork" and len(family) < 5:
            twin = TokenBuffer(growth=growth)
            twin.share(buffer)
            family.append((twin, held))
        elif operation == "die" and len(family) > 1:
            del family[index], buffer
            continue
        family[index] = (buffer, held)
        for each, wanted in family:
            assert torch.equal(each.view(), wanted)


def test_the_first_to_go_on_does_so_in_place_and_only_the_others_copy():
    first, second, third = TokenBuffer(), TokenBuffer(), TokenBuffer()
    first.append(tokens(100))
    second.share(first)
    third.share(second)
    memory = first.data
    assert second.data is memory
    assert third.data is memory
    second.append(tokens(3, 100))
    assert second.data is memory
    first.append(tokens(2, 200))
    assert first.data is not memory
    third.append(tokens(1, 300))
    assert third.data is not memory
    assert torch.equal(second.view(), tokens(103))
    assert torch.equal(first.view(), torch.cat([tokens(100), tokens(2, 200)], dim=TOKENS))


def test_what_a_fork_wrote_and_left_behind_is_free_again():
    original = TokenBuffer()
    original.append(tokens(100))
    memory = original.data
    for index in range(3):
        fork = TokenBuffer()
        fork.share(original)
        fork.append(tokens(5, 100 * index))
        assert fork.data is memory
        del fork
        gc.collect()
    original.append(tokens(5, 900))
    assert original.data is memory


def test_threads_that_go_on_at_once_do_not_meet():
    original = TokenBuffer(growth=4.0)
    original.append(tokens(50))
    forks = [TokenBuffer(growth=4.0) for _ in range(8)]
    for fork in forks:
        fork.share(original)
    start = threading.Barrier(8)

    def go_on(index: int) -> None:
        start.wait()
        for step in range(40):
            forks[index].append(tokens(1, 1000 * index + step))

    threads = [threading.Thread(target=go_on, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(original.view(), tokens(50))
    for index, fork in enumerate(forks):
        assert torch.equal(fork.view(), torch.cat([tokens(50), tokens(40, 1000 * index)], dim=TOKENS))


# --- buffers of fixed size ------------------------------------------------------------------------


def fixed(kind: type[FixedBuffer], held: int) -> tuple[FixedBuffer, TokenCount]:
    buffer, count = kind(8), TokenCount()
    buffer.allocate(2, 2, 3, torch.float32, CPU)
    count.allocate(CPU)
    write(buffer, count, held, 0)
    return buffer, count


def write(buffer: FixedBuffer, count: TokenCount, new: int, first: int) -> None:
    assert count.position is not None
    buffer.write(tokens(new, first), count.value, count.position)
    count.advance(new)


def counted(value: int) -> TokenCount:
    count = TokenCount()
    count.allocate(CPU)
    count.set(value)
    return count


@pytest.mark.parametrize("kind", [FixedBuffer, RingBuffer])
def test_the_owner_keeps_its_memory_and_a_borrower_copies_before_it_writes(kind):
    buffer, count = fixed(kind, 4)
    memory = buffer.data
    fork = kind(8)
    fork.share(buffer, 4)
    assert fork.data is memory
    write(buffer, count, 2, 100)
    assert buffer.data is memory
    assert fork.data is memory
    assert torch.equal(fork.view(0, 4), tokens(4))
    write(fork, counted(4), 1, 200)
    assert fork.data is not memory
    assert torch.equal(fork.view(0, 5), torch.cat([tokens(4), tokens(1, 200)], dim=TOKENS))
    assert torch.equal(buffer.view(0, 6), torch.cat([tokens(4), tokens(2, 100)], dim=TOKENS))


@pytest.mark.parametrize("taking_back", ["crop", "release", "restore", "own"])
def test_a_borrower_keeps_what_the_owner_takes_back(taking_back):
    buffer, count = fixed(FixedBuffer, 4)
    memory = buffer.data
    fork, grandchild = FixedBuffer(8), FixedBuffer(8)
    fork.share(buffer, 4)
    grandchild.share(fork, 4)
    if taking_back == "crop":
        buffer.drop_newest(4, 2)
        count.set(2)
    elif taking_back == "release":
        buffer.release()
        count.set(0)
    elif taking_back == "restore":
        buffer.restore({"": tokens(4, 700)})
    else:
        buffer.memory()
    write(buffer, count, 2, 100)
    assert buffer.data is memory
    for each in (fork, grandchild):
        assert each.data is not memory
        assert torch.equal(each.view(0, 4), tokens(4))


def test_a_borrower_keeps_what_a_ring_writes_over():
    ring, count = fixed(RingBuffer, 7)
    memory = ring.data
    fork = RingBuffer(8)
    fork.share(ring, 7)
    write(ring, count, 3, 100)
    assert ring.data is memory
    assert torch.equal(fork.view(0, 7), tokens(7))


def test_a_borrower_survives_the_owner():
    buffer, _ = fixed(FixedBuffer, 4)
    fork = FixedBuffer(8)
    fork.share(buffer, 4)
    del buffer
    gc.collect()
    write(fork, counted(4), 1, 4)
    assert torch.equal(fork.view(0, 5), tokens(5))


# --- caches ---------------------------------------------------------------------------------------

LAYERS = (LayerSpec(), LayerSpec(attention="sliding", window=6), LayerSpec(attention=None))


def states(new: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 2, new, 4, generator=generator), torch.randn(2, 2, new, 4, generator=generator)


def filled(name: str, held: int) -> kvrack.Cache:
    cache = kvrack.create_cache(name, ModelSpec(layers=LAYERS))
    for index in (0, 1):
        cache.update(*states(held, index), index)
    return cache


@pytest.mark.usefixtures("plain")
def test_a_fork_allocates_nothing_for_the_tokens_held():
    for held in (100, 1000):
        cache = filled("plain", held)
        with Allocated() as allocated:
            fork = cache.fork()
        assert allocated.elements == 0
        assert fork.get_seq_length() == held
        assert fork.nbytes == cache.nbytes


@pytest.mark.usefixtures("plain")
def test_a_fork_at_an_earlier_point_holds_that_many_tokens():
    cache = filled("plain", 30)
    cache.layers[1].activate_past_recording()
    for index in (0, 1):
        cache.update(*states(10, 5 + index), index)
    fork = cache.fork(tokens=33)
    assert (cache.get_seq_length(), fork.get_seq_length()) == (40, 33)
    assert torch.equal(fork.layers[0].keys, cache.layers[0].keys[:, :, :33])
    expected = filled("plain", 30)
    for index in (0, 1):
        expected.update(*(each[:, :, :3] for each in states(10, 5 + index)), index)
        keys, _ = expected.update(*states(1, 50), index)
        assert torch.equal(fork.update(*states(1, 50), index)[0], keys)
    assert cache.fork(tokens=40).get_seq_length() == 40
    assert cache.fork(tokens=0).get_seq_length() == 0


@pytest.mark.usefixtures("plain")
def test_a_fork_past_a_window_is_refused_and_one_out_of_range_too():
    cache = filled("plain", 30)
    with pytest.raises(kvrack.UnsupportedOperation, match="records_past"):
        cache.fork(tokens=20)
    for wrong in (-1, 31):
        with pytest.raises(ValueError, match=rf"fork\(tokens={wrong}\): expected 0 to 30, the tokens seen"):
            cache.fork(tokens=wrong)
    assert cache.get_seq_length() == 30
