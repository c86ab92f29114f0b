"""What the backends tell of themselves, each kind of event where it really happens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import kvrack
from kvrack import CacheEvent, LayerSpec, ModelSpec, events

WINDOW = 4
HEADS, HEAD_DIM = 2, 64
TOKEN = HEADS * HEAD_DIM * 4
"""Bytes of one token's keys, or values, in one layer."""

FULL = ModelSpec.uniform(2)
SLIDING = ModelSpec(layers=(LayerSpec(attention="sliding", window=WINDOW),))


@pytest.fixture
def told() -> Iterator[list[CacheEvent]]:
    """What was told since the test began."""
    found: list[CacheEvent] = []
    with kvrack.listen(found.append):
        yield found


def feed(cache: kvrack.Cache, tokens: int) -> None:
    for index in range(len(cache)):
        cache.update(torch.randn(1, HEADS, tokens, HEAD_DIM), torch.randn(1, HEADS, tokens, HEAD_DIM), index)


def of_kind(told: list[CacheEvent], kind: str) -> list[CacheEvent]:
    return [event for event in told if event.kind == kind]


@pytest.mark.parametrize("name", ["dynamic", "static"])
def test_memory_taken_is_told_as_often_as_it_is_taken(told, name):
    cache = kvrack.create_cache(name, FULL, max_length=100)
    assert told == [CacheEvent("created", name, None, 0, 0)]
    for tokens in (30, *[1] * 60):
        feed(cache, tokens)
    grown = of_kind(told, "grown")
    assert Counter(event.layer_index for event in grown) == {0: len(grown) // 2, 1: len(grown) // 2}
    assert all(event.place == "cpu" for event in grown)
    assert all(event.nbytes == event.tokens * TOKEN for event in grown)
    # What was taken last is what is held; memory that is preallocated is taken once.
    assert sum(event.nbytes for event in grown[-4:]) == cache.nbytes - (name == "static") * _counts(cache)
    assert len(grown) == 4 if name == "static" else len(grown) > 4
    assert len(told) == 1 + len(grown)


def _counts(cache: kvrack.Cache) -> int:
    """Return the bytes of what isn't a token."""
    return sum(row.nbytes for row in cache.memory() if row.role not in ("keys", "values"))


@pytest.mark.parametrize("name", ["dynamic", "static", "offloaded"])
def test_what_leaves_a_window_is_told_once_a_layer(told, name):
    cache = kvrack.create_cache(name, SLIDING, max_length=100)
    # A ring has a slot for the newest token too, memory that grows holds what the next query sees besides itself.
    held = WINDOW if name == "static" else WINDOW - 1
    for tokens in (3, 2, 1, 9):
        feed(cache, tokens)
    evicted = of_kind(told, "evicted")
    assert {(event.backend, event.layer_index, event.nbytes) for event in evicted} == {(name, 0, 0)}
    assert sum(event.tokens for event in evicted) == 15 - held
    assert len(evicted) == 3


@pytest.mark.parametrize(
    ("name", "config", "bytes_each"),
    [
        ("fp8", {}, HEADS * (HEAD_DIM + 4)),
        ("fp8", {"layout": "static", "max_cache_len": 200}, HEADS * (HEAD_DIM + 4)),
        ("hqq", {"nbits": 4, "residual_length": 0, "sink_tokens": 0}, None),
        ("quanto", {"nbits": 2, "residual_length": 0, "sink_tokens": 0}, None),
    ],
)
def test_codecs_tell_what_they_encode(told, name, config, bytes_each):
    cache = kvrack.create_cache(name, ModelSpec.uniform(1), **config)
    told.clear()
    feed(cache, 128)
    flushed = of_kind(told, "flushed")
    assert [(event.backend, event.layer_index, event.tokens) for event in flushed] == [(name, 0, 128)] * 2
    for event in flushed:
        assert 0 < event.nbytes < 128 * TOKEN / 3
        if bytes_each is not None:
            assert event.nbytes == 128 * bytes_each
    assert of_kind(told, "grown")


def test_what_goes_to_a_file_is_told_with_its_bytes(told, tmp_path):
    cache = kvrack.create_cache("offload", FULL, tier="disk", folder=str(tmp_path))
    for tokens in (7, 1):
        feed(cache, tokens)
    spilled = of_kind(told, "spilled")
    assert spilled == [
        CacheEvent("spilled", "offload", index, tokens, tokens * TOKEN, "disk")
        for tokens in (7, 1)
        for index in (0, 0, 1, 1)
    ]
    assert sum(event.nbytes for event in spilled) == cache.layers[0].traffic.out


def test_codes_that_go_to_a_file_are_told_in_tokens(told):
    settings = {"inner": "hqq", "inner_config": {"residual_length": 0, "sink_tokens": 0}, "tier": "disk"}
    cache = kvrack.create_cache("offload", ModelSpec.uniform(1), **settings)
    feed(cache, 128)
    spilled = of_kind(told, "spilled")
    assert {event.tokens for event in spilled} == {128}
    assert {event.tokens for event in of_kind(told, "flushed")} == {128}


def test_a_compiled_graph_is_the_same_whoever_listens() -> None:
    counts = []
    for is_listened_to in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        cache = kvrack.create_cache("dynamic", ModelSpec.uniform(1))
        update = torch.compile(cache.update, backend="eager", fullgraph=True)
        found: list[CacheEvent] = []
        listening = kvrack.listen(found.append) if is_listened_to else None
        for step in range(40):
            # Whoever begins to listen in between makes no graph anew either.
            with kvrack.listen(found.append) if step % 7 == 3 else torch.no_grad():
                update(torch.randn(1, HEADS, 1, HEAD_DIM), torch.randn(1, HEADS, 1, HEAD_DIM), 0)
        if listening is not None:
            listening.stop()
        assert found == []
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[1] > 0
    assert events.listeners == ()
