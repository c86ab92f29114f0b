"""What travels when: new tokens out, whole layers back, the next layer ahead of its turn, two slots a device."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
from offload_helpers import WINDOW, expect_alike, feed, spec, states

import kvrack
from kvrack_offload.lanes import CpuLane, Job, Lane, StreamLane, Ticket
from kvrack_offload.prefetch import Prefetcher

TOKEN = 2 * 3 * 16 * 4
"""Bytes of one token's keys, or values, in one layer."""


def prefetcher(cache: kvrack.Cache) -> Prefetcher:
    """Return what the offloaded layers of a cache share."""
    return next(layer for layer in cache.layers if hasattr(layer, "traffic"))._hold.station.prefetcher


class Watch(CpuLane):
    """A lane that notes which homes are read, and whether by a prefetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[list[Job]] = []

    def fetch(self, jobs) -> Ticket:
        self.fetched.append(list(jobs))
        return super().fetch(jobs)


def watch(cache: kvrack.Cache) -> Watch:
    lane = Watch()
    prefetcher(cache)._lanes[torch.device("cpu")] = lane
    return lane


@pytest.mark.parametrize(("inner", "token_bytes"), [("dynamic", TOKEN), ("static", TOKEN)])
def test_out_go_the_new_tokens_whatever_is_held(on_disk, inner, token_bytes):
    if inner not in kvrack.backends():
        pytest.skip(f"the held backend is kvrack-{inner}'s: pip install kvrack-{inner}")
    cache = on_disk("full", "full", "full", inner=inner)
    traffic = cache.layers[0].traffic
    out = []
    for new in (40, 1, 1, 5, 1, 200, 1, 1):
        before = traffic.out
        feed(cache, (new,))
        out.append((traffic.out - before) / (2 * 3 * token_bytes))
    assert out == [40, 1, 1, 5, 1, 200, 1, 1]


def test_out_goes_of_a_long_prompt_what_a_window_keeps(on_disk):
    cache = on_disk("sliding")
    feed(cache, (100, 1, 1))
    assert cache.layers[0].traffic.out == 2 * TOKEN * (WINDOW - 1 + 2)


def test_codes_travel_as_codes(on_disk):
    pytest.importorskip("kvrack_fp8", reason="the codec is kvrack-fp8's: pip install kvrack-fp8")
    cache = on_disk("full", "full", inner="fp8")
    feed(cache, (50,))
    traffic = cache.layers[0].traffic
    before = (traffic.out, traffic.back)
    # As many as are encoded at once; single ones would wait, exact.
    feed(cache, (4,))
    code = 2 * 3 * (16 + 4)
    assert traffic.out - before[0] == 2 * 2 * 4 * code
    # Both layers' codes once; beyond them nothing comes back but the first layer's next turn, ahead.
    assert traffic.back - before[1] in (2 * 2 * 50 * code, 2 * (2 * 50 + 50) * code)


def test_back_come_whole_layers_once_a_step(on_disk):
    cache = on_disk("full", "full", "full", "full")
    feed(cache, (20, 1, 1))
    traffic = cache.layers[0].traffic
    before = traffic.back
    feed(cache, (1,) * 3)
    # The first layer is brought ahead of the step that needs it.
    assert traffic.back - before == 2 * TOKEN * (3 * (22 + 23 + 24) + (23 + 24 + 25))


def test_each_layer_is_read_while_the_one_before_it_is_updated(on_disk):
    cache = on_disk("full", "full", "full", "full")
    feed(cache, (20, 1, 1))
    lane = watch(cache)
    homes = [{part.home for part in layer._hold.station.parts()} for layer in cache.layers]
    for index in range(4):
        lane.fetched.clear()
        cache.update(*states(1), index)
        read = [{job.home for job in jobs} for jobs in lane.fetched]
        assert read == [homes[(index + 1) % 4]], f"update of layer {index}"


def test_hybrid_models_prefetch_the_next_layer_that_is_offloaded(on_disk):
    cache = on_disk("full", "sliding", "sliding", "full", "sliding", "full", offload_only_non_sliding=True)
    away = [index for index, layer in enumerate(cache.layers) if layer.elsewhere() or hasattr(layer, "traffic")]
    assert away == [0, 3, 5]
    feed(cache, (20, 1, 1))
    lane = watch(cache)
    homes = {index: {part.home for part in cache.layers[index]._hold.station.parts()} for index in away}
    read = []
    for index in range(6):
        lane.fetched.clear()
        cache.update(*states(1), index)
        read.append([next(i for i in away if homes[i] == {job.home for job in jobs}) for jobs in lane.fetched])
    assert read == [[3], [], [], [5], [], [0]]


def test_layers_passed_over_are_read_when_their_turn_comes_after_all(on_disk):
    cache, twin = on_disk("full", "full", "full"), kvrack.create_cache("dynamic", spec("full", "full", "full"))
    for each in (cache, twin):
        feed(each, (9, 1))
    for index in (0, 2, 1, 1, 0, 2, 2, 0, 1):
        given = states(1, seed=90 + index)
        seen, wanted = cache.update(*given, index), twin.update(*given, index)
        assert all(torch.equal(*pair) for pair in zip(seen, wanted, strict=True))


def test_two_slots_serve_any_number_of_layers(on_disk):
    cache = on_disk(*["full"] * 8)
    feed(cache, (50, 1, 1))
    scratch = [row for row in cache.memory() if row.role == "scratch"]
    # Keys and values in two slots, with a quarter more than was asked for.
    assert len(scratch) == 4
    assert sum(row.nbytes for row in scratch) <= 4 * 1.25 * 54 * TOKEN


def test_resident_layers_stay(on_disk):
    cache = on_disk("full", "full", "full", resident_layers=2)
    feed(cache, (9, 1))
    assert [{row.device for row in cache.memory() if row.layer == i and row.role != "scratch"} for i in range(3)] == [
        {"cpu"},
        {"cpu"},
        {"disk"},
    ]


def test_beams_that_stay_where_they_are_move_nothing(on_disk):
    cache = on_disk("full")
    feed(cache, (9, 1))
    before = cache.layers[0].traffic.out
    cache.reorder_cache(torch.tensor([0, 1]))
    assert cache.layers[0].traffic.out == before
    cache.reorder_cache(torch.tensor([1, 0]))
    assert cache.layers[0].traffic.out == before + 2 * 10 * TOKEN


def test_room_on_disk_is_used_again(on_disk):
    cache = on_disk("sliding", "full")
    for _ in range(3):
        feed(cache, (30,) + (1,) * 300)
        cache.reset()
    held = [path.stat().st_size for path in _files(cache)]
    assert held == [sum(size for size, _ in prefetcher(cache)._file._free) or held[0]]
    assert sum(held) < 4 << 20


def _files(cache):
    return [prefetcher(cache)._file.path]


# --- several devices ----------------------------------------------------------------------------


class Faraway(Lane):
    """A lane to a device that has shapes but no memory: it notes what is asked of it."""

    def __init__(self) -> None:
        self.fetched: list[Job] = []
        self.stored: list[torch.Tensor] = []

    def fetch(self, jobs) -> Ticket:
        self.fetched += jobs
        return Ticket()

    def store(self, home, first, data) -> None:
        self.stored.append(data)

    def finish(self) -> None:
        pass


def test_each_device_has_slots_of_its_own(on_disk):
    cache = on_disk(*["full"] * 6)
    twin = kvrack.create_cache("dynamic", spec(*["full"] * 6))
    meta, lane = torch.device("meta"), Faraway()
    prefetcher(cache)._lanes[meta] = lane
    for step, new in enumerate((20, 1, 1, 1)):
        for index in range(6):
            given = states(new, seed=step)
            if index % 2:
                returned = cache.update(*(each.to(meta) for each in given), index)
                assert {each.device for each in returned} == {meta}
                assert returned[0].shape[2] == 20 + step
            else:
                seen, wanted = cache.update(*given, index), twin.update(*given, index)
                assert all(torch.equal(*pair) for pair in zip(seen, wanted, strict=True))
    assert {job.out.device for job in lane.fetched} == {meta}
    # One of the three layers there may stay in a slot.
    assert 2 * 2 * TOKEN * (20 + 21 + 22) <= sum(job.out.shape[0] for job in lane.fetched) <= 6 * TOKEN * (20 + 21 + 22)
    assert sum(each.shape[0] for each in lane.stored) == 2 * 3 * TOKEN * 23
    devices = [row.device for row in cache.memory() if row.role == "scratch"]
    assert sorted(devices) == ["cpu"] * 4 + ["meta"] * 4


class Stream:
    """A stream that writes down what it is asked for."""

    def __init__(self, log: list[str], name: str = "side") -> None:
        self.log, self.name, self.device = log, name, torch.device("cpu")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for {event.name}")


class Event:
    def __init__(self, log: list[str]) -> None:
        self.log, self.name = log, "nothing"

    def record(self, stream: Stream) -> None:
        self.name = f"{stream.name} {sum('marks' in line for line in self.log) + 1}"
        self.log.append(f"{stream.name} marks {self.name}")

    def synchronize(self) -> None:
        raise AssertionError("the host waited")


@pytest.fixture
def streams(monkeypatch):
    """A machine with streams, as far as a lane can tell: each copy is made at once, and all is written down."""
    log: list[str] = []
    current = [Stream(log, "compute")]
    monkeypatch.setattr(torch, "Stream", lambda device: Stream(log))
    monkeypatch.setattr(torch, "Event", lambda device: Event(log))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: current[0])
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda self, stream: log.append(f"memory kept for {stream.name}")
    )
    return log, current


def test_copies_on_a_side_stream_are_ordered_by_events(streams, on_disk):
    log, current = streams
    cache, twin = on_disk("full", "full", "full"), kvrack.create_cache("dynamic", spec("full", "full", "full"))
    prefetcher(cache)._lanes[torch.device("cpu")] = StreamLane(torch.device("cpu"))
    for each in (cache, twin):
        feed(each, (9, 1, 1))
    log.clear()
    expect_alike(cache, twin)
    assert current[0].name == "compute", "the stream of the caller is given back"
    per_layer = [
        # Ready before the layer that was brought ahead is read,
        "compute waits for",
        # the next layer's copy after what the device was asked for, in a slot that is free by then,
        "compute marks", "side waits for", "side marks",
        # new keys, then new values out, each after it was written.
        "compute marks", "side waits for", "side marks", "memory kept for side",
        "compute marks", "side waits for", "side marks", "memory kept for side",
    ]  # fmt: skip
    told = [next(start for start in per_layer if line.startswith(start)) for line in log]
    assert told == per_layer * 3
    waits = [line.split()[-1] for line in log if line.startswith("compute waits")]
    marked = [line.split()[-1] for line in log if line.startswith("side marks")]
    assert set(waits[1:]) <= set(marked)


# --- without an accelerator ---------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator to offload from")
def test_host_without_accelerator_is_the_held_backend_and_says_so_once(caplog):
    from kvrack_offload.build import _warn_once

    _warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="kvrack"):
        caches = [kvrack.create_cache("offloaded", spec("full", "sliding")) for _ in range(3)]
    assert [record.name for record in caplog.records] == ["kvrack.offload"]
    assert "no accelerator, so host memory is where the cache is anyway" in caplog.text
    assert [type(layer).__name__ for layer in caches[0].layers] == ["DynamicLayer", "DynamicLayer"]
    feed(caches[0], (9, 1))
    expect_alike(caches[0], _fed(kvrack.create_cache("dynamic", spec("full", "sliding"))))


def _fed(cache: kvrack.Cache) -> kvrack.Cache:
    feed(cache, (9, 1))
    return cache


# --- a third party's ----------------------------------------------------------------------------


def test_what_asks_for_no_buffers_is_offloaded_through_storage(on_disk, monkeypatch, request):
    monkeypatch.syspath_prepend(request.path.parent / "stranger")
    kvrack.registry.refresh()
    cache, twin = on_disk(*["full"] * 5, inner="stranger"), kvrack.create_cache("stranger", spec(*["full"] * 5))
    loaded: list[weakref.ref[torch.Tensor]] = []
    for each in (cache, twin):
        feed(each, (9, 1, 1, 4))
    expect_alike(cache, twin)
    for layer in cache.layers:
        loaded += [weakref.ref(tensor) for tensor in layer._hold.inner.storage().values()]
    gc.collect()
    assert sum(each() is not None for each in loaded) <= 2 * 2, "more layers are on the device than there are slots"
    for each in (cache, twin):
        each.reorder_cache(torch.tensor([1, 1]))
        each.crop(-2)
    expect_alike(cache, twin)
    assert {row.device for row in cache.memory() if row.role == "keys"} == {"disk"}
