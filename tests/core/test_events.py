"""What caches tell, and who is told: at run time, by a plugin, and nobody."""

from __future__ import annotations

import copy
import logging
import re
import subprocess
import sys

import pytest
import torch

import kvrack
from kvrack import CacheEvent, LayerSpec, ModelSpec, PrefixStore, events, registry
from kvrack.buffer import MIN_ROOM

pytestmark = pytest.mark.usefixtures("plain")

WINDOW = 4
SPEC = ModelSpec(layers=(LayerSpec(), LayerSpec(attention="sliding", window=WINDOW)))
TOKEN = 2 * 3 * 4
"""Bytes of one token's keys, or values, in one layer."""


def feed(cache: kvrack.Cache, tokens: int, layers: tuple[int, ...] = (0, 1)) -> None:
    for index in layers:
        cache.update(torch.ones(1, 2, tokens, 3), torch.ones(1, 2, tokens, 3), index)


def test_each_kind_is_told_with_its_layer_tokens_and_bytes():
    told: list[CacheEvent] = []
    with kvrack.listen(told.append):
        cache = kvrack.create_cache("plain", SPEC)
        assert told == [CacheEvent("created", "plain", None, 0, 0)]
        told.clear()
        feed(cache, 1)
        room = MIN_ROOM + 1
        grown = [CacheEvent("grown", "plain", index, room, room * TOKEN, "cpu") for index in (0, 0, 1, 1)]
        assert told == grown
        told.clear()
        feed(cache, WINDOW - 1)
        assert told == [CacheEvent("evicted", "plain", 1, 1, 0, "cpu")]
        told.clear()
        feed(cache, 30, layers=(1,))
        assert told == [CacheEvent("evicted", "plain", 1, 30, 0, "cpu")]
        told.clear()
        fork = cache.fork()
        assert told == [CacheEvent("created", "plain", None, 4, cache.nbytes)]
        told.clear()
        feed(fork, 1, layers=(0,))
        # The room behind the tokens they share is the fork's now, so the other moves to memory of its own.
        assert told == []
        feed(cache, 1, layers=(0,))
        assert {(event.kind, event.layer_index, event.place) for event in told} == {("grown", 0, "cpu")}
        assert sum(event.nbytes for event in told) == cache.layers[0].nbytes
        told.clear()
        copy.deepcopy(cache)
        assert [event.kind for event in told if event.kind != "grown"] == ["created"]
    told.clear()
    feed(cache, 100)
    assert told == []


def test_recorded_past_is_not_evicted():
    told: list[CacheEvent] = []
    cache = kvrack.create_cache("plain", SPEC)
    cache.layers[1].activate_past_recording()
    with kvrack.listen(told.append):
        feed(cache, 3 * WINDOW)
    assert {event.kind for event in told} == {"grown"}


def test_a_store_tells_what_it_writes_and_what_it_lets_go_of(tmp_path):
    told: list[CacheEvent] = []

    def filled() -> kvrack.Cache:
        cache = kvrack.create_cache("plain", ModelSpec.uniform(1))
        feed(cache, 5, layers=(0,))
        return cache

    size = filled().nbytes
    store = PrefixStore(size, tmp_path)
    first, second = filled(), filled()
    with kvrack.listen(lambda event: told.append(event) if event.kind in ("spilled", "evicted") else None):
        store.put([1, 2, 3, 4, 5], first)
        (path,) = tmp_path.iterdir()
        file_size = path.stat().st_size
        store.put([6, 7, 8, 9, 10], second)
        assert told == [
            CacheEvent("spilled", "plain", None, 5, file_size, "disk"),
            CacheEvent("spilled", "plain", None, 5, told[1].nbytes, "disk"),
            CacheEvent("evicted", "plain", None, 5, size),
        ]
        told.clear()
        PrefixStore(0, tmp_path)
        assert told == [CacheEvent("evicted", "plain", None, 5, told[0].nbytes, "disk")]
        assert told[0].nbytes >= 2 * 5 * TOKEN


def test_a_listener_that_raises_is_logged_and_told_no_more_and_others_are(caplog):
    told: list[CacheEvent] = []

    def broken(event: CacheEvent) -> None:
        raise RuntimeError("boom")

    with kvrack.listen(broken), kvrack.listen(told.append), caplog.at_level(logging.ERROR, logger="kvrack"):
        cache = kvrack.create_cache("plain", SPEC)
        feed(cache, 5)
    assert [record.name for record in caplog.records] == ["kvrack.events"]
    assert "a listener failed at CacheEvent(kind='created'" in caplog.text
    assert "RuntimeError: boom" in caplog.text
    assert len(told) == 6
    assert cache.get_seq_length() == 5


def test_stop_is_for_one_listener_and_may_be_called_again():
    told: list[CacheEvent] = []
    one, other = kvrack.listen(told.append), kvrack.listen(told.append)
    one.stop()
    one.stop()
    kvrack.create_cache("plain", SPEC)
    assert len(told) == 1
    other.stop()
    kvrack.create_cache("plain", SPEC)
    assert len(told) == 1
    assert events.listeners == ()


LISTENER = """
import kvrack

told = []

@kvrack.hookimpl
def kvrack_cache_event(event):
    told.append(event.kind)
"""


def test_an_installed_listener_is_told_from_the_first_cache_on(site):
    modules = {"my_listener.py": LISTENER}
    site.install("watch-dist", {"watch": "my_listener"}, modules, group=registry.LISTENER_GROUP)
    kvrack.create_cache("plain", SPEC)
    kvrack.create_cache("plain", SPEC)
    assert sys.modules["my_listener"].told == ["created", "created"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('boom')", "is installed but failed to load: RuntimeError: boom"),
        ("nothing = 1", "it has no kvrack_cache_event hook"),
        (LISTENER.replace("(event)", "(event, extra)"), "is not a valid plugin: .*extra"),
        (LISTENER.replace("(event)", "(**anything)"), "swallows arguments"),
    ],
)
def test_a_broken_listener_is_logged_once_and_caches_are_made(site, caplog, text, reason):
    site.install("watch-dist", {"watch": "my_listener"}, {"my_listener.py": text}, group=registry.LISTENER_GROUP)
    with caplog.at_level(logging.WARNING, logger="kvrack"):
        for _ in range(2):
            kvrack.create_cache("plain", SPEC)
    (record,) = caplog.records
    assert record.name == "kvrack.events"
    assert record.getMessage().startswith("listener 'watch' (from watch-dist 1.0) ")
    assert re.search(reason, record.getMessage())


def test_nothing_is_built_for_nobody(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("an event was built though nobody listens")

    cache = kvrack.create_cache("plain", SPEC)
    assert events.listeners == ()
    monkeypatch.setattr(events, "CacheEvent", refuse)
    for tokens in (1, 50, 1):
        feed(cache, tokens)
    feed(cache.fork(), 1)


def test_listening_imports_no_torch():
    code = "import sys, kvrack; kvrack.listen(print); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
