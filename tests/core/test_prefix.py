"""The prefix store: the longest usable beginning of a prompt, shared, bounded, kept in a folder, safe under threads."""

from __future__ import annotations

import itertools
import logging
import re
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvrack
from kvrack import LayerSpec, ModelSpec, PrefixStore
from kvrack.prefix import SUFFIX
from kvrack.trie import Trie

FULL = ModelSpec(layers=(LayerSpec(), LayerSpec(attention=None), LayerSpec()))
SLIDING = ModelSpec(layers=(LayerSpec(attention="sliding", window=4),))
PLENTY = 1 << 30

pytestmark = pytest.mark.usefixtures("plain")


def states(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values that are computed from the tokens, as a model's are."""
    keys = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1).expand(1, 2, -1, 4)
    return keys, -keys


def feed(cache: kvrack.Cache, tokens: list[int]) -> None:
    for index, layer in enumerate(cache.layers):
        if layer.spec.attention is not None:
            cache.update(*states(tokens), index)


def filled(tokens: list[int], spec: ModelSpec = FULL, **config: float) -> kvrack.Cache:
    cache = kvrack.create_cache("plain", spec, **config)
    feed(cache, tokens)
    return cache


def held(cache: kvrack.Cache | None) -> list[int]:
    """Return the tokens in a cache's first layer, which all of its layers must have."""
    assert cache is not None
    found = [layer.keys[0, 0, :, 0].tolist() for layer in cache.layers if layer.spec.attention is not None]
    assert all(each == found[0] for each in found)
    return [int(token) for token in found[0]]


# --- the tree -------------------------------------------------------------------------------------

SEQUENCE = st.lists(st.integers(0, 2), max_size=7).map(tuple)


@given(
    steps=st.lists(st.tuples(st.sampled_from(["insert", "insert", "remove"]), SEQUENCE), max_size=40), sought=SEQUENCE
)
def test_a_tree_finds_what_a_dict_would(steps, sought):
    trie, plain = Trie(), {}
    for number, (operation, tokens) in enumerate(steps):
        if operation == "insert":
            assert trie.insert(tokens, number) == plain.get(tokens)
            plain[tokens] = number
        elif tokens in plain:
            trie.remove(tokens)
            del plain[tokens]
        else:
            with pytest.raises(KeyError):
                trie.remove(tokens)
    shared = {
        value: next(
            (i for i, (a, b) in enumerate(zip(tokens, sought, strict=False)) if a != b), min(len(tokens), len(sought))
        )
        for tokens, value in plain.items()
    }
    found = list(trie.nearest(sought))
    assert {value: length for length, value in found} == {value: length for value, length in shared.items() if length}
    assert len(found) == len({value for _, value in found})
    assert [length for length, _ in found] == sorted((length for length, _ in found), reverse=True)
    lengths = {value: len(tokens) for tokens, value in plain.items()}
    for (one, first), (other, second) in itertools.pairwise(found):
        assert not (one == other and lengths[second] == other and lengths[first] != one)


# --- finding --------------------------------------------------------------------------------------


def test_the_longest_prefix_is_given_and_longer_entries_are_branched():
    store = PrefixStore(PLENTY)
    assert store.get([1, 2, 3]) == (None, 0)
    for tokens in ([1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3, 9], [7, 8]):
        assert store.put(tokens, filled(tokens))
    for asked, expected in (
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6]),
        ([1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 5], [1, 2]),
        ([1, 3], [1]),
        ([7, 8], [7, 8]),
    ):
        cache, length = store.get(asked)
        assert (held(cache), length) == (expected, len(expected))
        assert store.shared_length(asked) == len(expected)
    assert store.get([9]) == (None, 0)
    assert (store.stats.hits, store.stats.misses, store.stats.entries) == (5, 2, 4)
    assert store.stats.tokens == 6 + 4 + 2 + 1 + 2


def test_where_a_window_cannot_go_back_a_shorter_entry_serves():
    store = PrefixStore(PLENTY)
    store.put([1, 2, 3, 4, 5, 6, 7, 8], filled([1, 2, 3, 4, 5, 6, 7, 8], SLIDING))
    assert store.get([1, 2, 3, 4, 5, 9]) == (None, 0)
    assert store.shared_length([1, 2, 3, 4, 5, 9]) == 5
    store.put([1, 2, 3], filled([1, 2, 3], SLIDING))
    cache, length = store.get([1, 2, 3, 4, 5, 9])
    assert (held(cache), length) == ([1, 2, 3], 3)
    with pytest.raises(kvrack.UnsupportedOperation, match="records_past"):
        store.put([1, 2, 3, 4], filled([1, 2, 3, 4, 5, 6, 7, 8], SLIDING))


def test_what_is_given_and_put_goes_on_by_itself():
    store, cache = PrefixStore(PLENTY), filled([1, 2, 3])
    store.put([1, 2, 3], cache)
    feed(cache, [4, 5])
    cache.crop(-4)
    first, _ = store.get([1, 2, 3])
    second, _ = store.get([1, 2, 3, 4])
    assert first is not None
    assert second is not None
    feed(first, [6])
    feed(second, [7, 7])
    assert (held(first), held(second)) == ([1, 2, 3, 6], [1, 2, 3, 7, 7])
    assert held(store.get([1, 2, 3])[0]) == [1, 2, 3]


def test_a_cache_that_has_seen_more_is_kept_at_the_tokens_given():
    store = PrefixStore(PLENTY)
    store.put([1, 2], filled([1, 2, 3]))
    assert held(store.get([1, 2, 3])[0]) == [1, 2]


def test_only_what_was_built_alike_and_has_room_is_taken():
    store = PrefixStore(PLENTY)
    store.put([1, 2, 3], filled([1, 2, 3]))
    store.put([1, 2], filled([1, 2], growth=2.0))
    like = kvrack.create_cache("plain", FULL, 500, growth=2.0)
    cache, length = store.get([1, 2, 3], like=like)
    assert (length, cache.config) == (2, like.config)
    assert store.get([1, 2, 3], like=kvrack.create_cache("plain", SLIDING)) == (None, 0)
    assert store.get([1, 2, 3], room=1000)[1] == 3


def test_what_cannot_be_put_is_refused():
    store = PrefixStore(PLENTY)
    with pytest.raises(ValueError, match="expected tokens, got none"):
        store.put([], filled([1]))
    with pytest.raises(ValueError, match="has seen 3 tokens, got 2"):
        store.put([1, 2, 3], filled([1, 2]))
    cache = filled([1])
    cache.batch_repeat_interleave(2)
    with pytest.raises(ValueError, match="one row, got 2"):
        store.put([1], cache)
    with pytest.raises(ValueError, match="max_bytes: expected 0 or more"):
        PrefixStore(-1)


# --- memory ---------------------------------------------------------------------------------------


def test_shared_memory_is_counted_once():
    store, cache = PrefixStore(PLENTY), filled(list(range(100)))
    store.put(list(range(100)), cache)
    assert store.stats.nbytes == cache.nbytes
    feed(cache, [1, 2, 3])
    store.put([*range(100), 1, 2, 3], cache)
    assert len(store) == 2
    assert store.stats.nbytes == cache.nbytes
    other = filled([5] * 50)
    store.put([5] * 50, other)
    assert store.stats.nbytes == cache.nbytes + other.nbytes


def test_the_least_recently_used_go_first_until_the_rest_fits():
    size = filled([1] * 20).nbytes
    store = PrefixStore(3 * size)
    for first in (1, 2, 3):
        store.put([first] * 20, filled([first] * 20))
    store.get([1] * 20)
    assert store.put([4] * 20, filled([4] * 20))
    assert [store.get([first] * 20)[1] for first in (1, 2, 3, 4)] == [20, 0, 20, 20]
    assert store.stats.nbytes <= store.max_bytes
    assert not PrefixStore(size - 1).put([1] * 20, filled([1] * 20))
    store.clear()
    assert (len(store), store.stats.nbytes) == (0, 0)


# --- the folder -----------------------------------------------------------------------------------


def test_entries_survive_in_a_folder(tmp_path):
    store = PrefixStore(PLENTY, tmp_path / "new" / "folder", fingerprint="this model")
    for tokens in ([1, 2, 3], [1, 2, 3, 4, 5], [6]):
        store.put(tokens, filled(tokens))
    again = PrefixStore(PLENTY, tmp_path / "new" / "folder", fingerprint="this model")
    assert len(again) == 3
    assert again.stats.nbytes == sum(path.stat().st_size for path in (tmp_path / "new" / "folder").iterdir())
    assert held(again.get([1, 2, 3, 4, 9])[0]) == [1, 2, 3, 4]
    assert held(again.get([6])[0]) == [6]
    assert len(PrefixStore(PLENTY, tmp_path / "new" / "folder", fingerprint="another")) == 0
    again.clear()
    assert len(PrefixStore(PLENTY, tmp_path / "new" / "folder", fingerprint="this model")) == 0


def test_damaged_and_foreign_files_are_skipped_and_logged(tmp_path, caplog):
    store = PrefixStore(PLENTY, tmp_path)
    for tokens in ([1, 2, 3], [4, 5], [4, 5, 6]):
        store.put(tokens, filled(tokens))
    files = {tuple(kvrack.describe(path).token_ids): path for path in tmp_path.iterdir()}
    header = files[1, 2, 3].read_bytes()
    files[1, 2, 3].write_bytes(header[:30] + b"?" + header[31:])
    body = bytearray(files[4, 5, 6].read_bytes())
    body[-3] ^= 1
    files[4, 5, 6].write_bytes(body)
    (tmp_path / f"mine{SUFFIX}").write_text("my own notes")
    with caplog.at_level(logging.WARNING, logger="kvrack"):
        again = PrefixStore(PLENTY, tmp_path)
        assert [record.name for record in caplog.records] == ["kvrack.prefix"] * 2
        assert len(again) == 2
        cache, length = again.get([4, 5, 6, 7])
    assert len(caplog.records) == 3
    assert re.search(
        "prefix store: skipped: .*is corrupted: the checksum of its tensor", caplog.records[2].getMessage()
    )
    assert (held(cache), length) == ([4, 5], 2)
    assert (tmp_path / f"mine{SUFFIX}").exists()


def test_an_evicted_entry_takes_its_file_along(tmp_path):
    size = filled([1] * 20).nbytes
    store = PrefixStore(2 * size, tmp_path)
    for first in (1, 2, 3):
        store.put([first] * 20, filled([first] * 20))
    kept = [kvrack.describe(path).token_ids for path in tmp_path.iterdir()]
    assert sorted(kept) == [[2] * 20, [3] * 20]
    assert [store.get([first] * 20)[1] for first in (1, 2, 3)] == [0, 20, 20]


# --- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_folder", [False, True])
def test_eight_threads_get_what_they_asked_for(tmp_path: Path, in_folder: bool):
    prefix = list(range(40))
    store = PrefixStore(20 * filled(prefix).nbytes, tmp_path if in_folder else None)
    store.put(prefix, filled(prefix))
    failures: list[str] = []
    start = threading.Barrier(8)

    def work(number: int) -> None:
        start.wait()
        for turn in range(12):
            asked = [*prefix[: 40 - turn % 3], 100 + number, turn]
            cache, length = store.get(asked)
            if cache is None:
                cache = kvrack.create_cache("plain", FULL)
            elif held(cache) != asked[:length]:
                failures.append(f"{number}: asked {asked}, got {held(cache)}")
            feed(cache, asked[length:])
            store.put(asked, cache)
            feed(cache, [7])
            if held(cache) != [*asked, 7]:
                failures.append(f"{number}: fed {asked}, holds {held(cache)}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    stats = store.stats
    assert stats.hits + stats.misses == 8 * 12
    assert stats.nbytes <= store.max_bytes
