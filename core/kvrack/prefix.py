"""PrefixStore: caches by the tokens they have seen, so that a prompt's known beginning isn't computed again.

The idea is SGLang's RadixAttention (Zheng et al. 2024) for whole caches: a tree over tokens, entries
that share memory as forks do, and the least recently used to go first.
"""

from __future__ import annotations

import hashlib
import heapq
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvrack import events
from kvrack.cache import Cache
from kvrack.errors import KvrackError, SnapshotError, UnsupportedOperation
from kvrack.layer import AttentionLayer, allocations
from kvrack.recipe import Recipe
from kvrack.shards import part_path
from kvrack.snapshot import Description, Devices, describe, restored
from kvrack.trie import Trie

logger = logging.getLogger("kvrack.prefix")

SUFFIX = ".kvrack.safetensors"
"""How the files in a store's folder end."""

FILES = "*.kvrack*.safetensors"
"""Which files in a folder are a store's: those of one rank's part name the rank before the last suffix."""

ON_DISK = "disk"
"""How events call the folder."""

MOST_REFUSALS = 4
"""Longer entries that may refuse to be branched shorter before only those of the right length are tried."""


@dataclass(frozen=True)
class PrefixStats:
    """What a store has done and holds.

    Attributes:
        hits: calls of `get` that found a prefix.
        misses: those that found none.
        tokens: tokens that hits gave, which need not be computed again.
        entries: sequences held.
        nbytes: bytes of memory that the entries hold, what they share counted once; of those that
            are in their file only, the file's.
    """

    hits: int
    misses: int
    tokens: int
    entries: int
    nbytes: int


@dataclass(eq=False)
class _Entry:
    """A cache by its tokens; `cache` is None as long as it is in its file only."""

    tokens: tuple[int, ...]
    kind: str
    backend: str
    cache: Cache | None
    path: Path | None = None
    file_bytes: int = 0


class _UnreadableError(Exception):
    """An entry's file can't be read, for this reason."""

    def __init__(self, entry: _Entry, reason: Exception) -> None:
        self.entry = entry
        self.reason = reason
        super().__init__(str(reason))


class PrefixStore:
    """Caches of one model by the tokens they have seen. Safe under threads.

    Entries are forks: putting and getting copies nothing, and what an entry shares with another, or
    with a cache that goes on, is held once. Nothing is ever written to an entry.

    Args:
        max_bytes: the most that the entries may take together, as `PrefixStats.nbytes` counts it;
            the least recently used go first, their files too.
        folder: keep each entry in a file there as well, for the next process; made if need be. A
            file that can't be read is skipped, and logged (``kvrack.prefix``).
        fingerprint: what the caches belong to, a model and a tokenizer. Files of another are passed
            over. The store can't tell models of the same shape apart by itself.
        device: where caches that are read from the folder go; one device, or one for each layer.
    """

    def __init__(
        self,
        max_bytes: int,
        folder: str | Path | None = None,
        fingerprint: str | None = None,
        device: Devices = "cpu",
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"PrefixStore.max_bytes: expected 0 or more, got {max_bytes}")
        self.max_bytes = max_bytes
        self.folder = None if folder is None else Path(folder)
        self.fingerprint = fingerprint
        self.device = device
        self._lock = threading.RLock()
        self._tries: dict[str, Trie[_Entry]] = {}
        # From the least to the most recently used.
        self._entries: OrderedDict[_Entry, None] = OrderedDict()
        self._hits = self._misses = self._tokens = 0
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._find_files(self.folder)

    def put(self, token_ids: Sequence[int], cache: Cache) -> bool:
        """Keep a fork of `cache` as what these tokens lead to, and return whether there was room for it.

        Args:
            token_ids: the tokens of one sequence, from the first on.
            cache: of one row, which has seen these tokens; if it has seen more, a branch at these
                is kept.

        Raises ValueError for no token, several rows, or a cache that has seen fewer, and
        UnsupportedOperation where its layers can't go back to these tokens.
        """
        tokens = tuple(int(token) for token in token_ids)
        if not tokens:
            raise ValueError("PrefixStore.put: expected tokens, got none")
        if cache.batch_size != 1:
            raise ValueError(f"PrefixStore.put: expected a cache of one row, got {cache.batch_size}")
        if not _counts(cache):
            forked = cache.fork()
        elif cache.get_seq_length() < len(tokens):
            raise ValueError(
                f"PrefixStore.put: expected a cache that has seen {len(tokens)} tokens, got {cache.get_seq_length()}"
            )
        else:
            forked = cache.fork(tokens=len(tokens))
        entry = _Entry(tokens, _kind(cache.recipe()), cache.name, forked)
        if self.folder is not None:
            entry.path = part_path(self.folder / self._file_name(entry), cache.model_spec.shard)
            forked.save(entry.path, self.fingerprint, tokens)
            entry.file_bytes = entry.path.stat().st_size
            if events.listeners:
                events.emit(
                    events.CacheEvent("spilled", entry.backend, None, len(tokens), entry.file_bytes, place=ON_DISK)
                )
        with self._lock:
            self._insert(entry)
            self._evict()
            return entry in self._entries

    def get(self, token_ids: Sequence[int], like: Cache | None = None, room: int = 0) -> tuple[Cache | None, int]:
        """Return a cache that has seen as many first tokens of these as any entry allows, and how many.

        An entry that has seen more is branched shorter, where its layers can go back so far. The
        cache is the caller's to go on with; ``(None, 0)`` where nothing serves.

        Args:
            token_ids: the tokens of one sequence, from the first on. To get logits, leave out the
                last one, which is then left to compute.
            like: take only what was built as this cache is, for the same model, backend and config.
            room: tokens that the cache must be able to take altogether.
        """
        tokens = tuple(int(token) for token in token_ids)
        with self._lock:
            found = self._find(tokens, like, room)
            if found is None:
                self._misses += 1
                return None, 0
            forked, shared, entry = found
            self._entries.move_to_end(entry)
            if entry.path is not None and entry.path.exists():
                os.utime(entry.path)
            self._hits += 1
            self._tokens += shared
            self._evict()
            return forked, shared

    def shared_length(self, token_ids: Sequence[int], like: Cache | None = None) -> int:
        """Return how many first tokens of these any entry has seen, whether or not it can be branched there.

        Where that is more than `get` gives, a cache put at this length serves the next such prompt.
        """
        tokens = tuple(int(token) for token in token_ids)
        with self._lock:
            return next((shared for shared, _ in self._nearest(tokens, like)), 0)

    def clear(self) -> None:
        """Forget every entry, its file too."""
        with self._lock:
            for entry in list(self._entries):
                self._remove(entry)

    @property
    def stats(self) -> PrefixStats:
        """What the store has done and holds, now."""
        with self._lock:
            return PrefixStats(self._hits, self._misses, self._tokens, len(self._entries), self._nbytes())

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)

    # --- finding --------------------------------------------------------------------------------

    def _nearest(self, tokens: tuple[int, ...], like: Cache | None) -> Iterable[tuple[int, _Entry]]:
        """Return the entries with how many tokens they share, those that share the most first."""
        kinds = self._tries if like is None else [_kind(like.recipe())]
        tries = [self._tries[kind] for kind in kinds if kind in self._tries]
        return heapq.merge(*(trie.nearest(tokens) for trie in tries), key=lambda found: -found[0])

    def _find(self, tokens: tuple[int, ...], like: Cache | None, room: int) -> tuple[Cache, int, _Entry] | None:
        while True:
            try:
                return self._first_that_serves(tokens, like, room)
            except _UnreadableError as error:
                # The tree is walked anew, since it lost an entry.
                self._forget(error.entry)
                _warn(error.reason)

    def _first_that_serves(
        self, tokens: tuple[int, ...], like: Cache | None, room: int
    ) -> tuple[Cache, int, _Entry] | None:
        refusals = 0
        for shared, entry in self._nearest(tokens, like):
            is_longer = shared < len(entry.tokens)
            if is_longer and refusals == MOST_REFUSALS:
                continue
            cache = self._read(entry)
            if 0 <= cache.get_max_length() < room:
                continue
            if not is_longer:
                return cache.fork(), shared, entry
            if _counts(cache):
                try:
                    return cache.fork(tokens=shared), shared, entry
                except UnsupportedOperation:
                    pass
            refusals += 1
        return None

    def _read(self, entry: _Entry) -> Cache:
        """Return an entry's cache, from its file if need be. Raises _UnreadableError."""
        if entry.cache is None:
            assert entry.path is not None
            try:
                entry.cache = restored(entry.path, describe(entry.path), self.device, self.fingerprint)
            except (KvrackError, OSError) as error:
                raise _UnreadableError(entry, error) from error
        return entry.cache

    # --- keeping --------------------------------------------------------------------------------

    def _insert(self, entry: _Entry) -> None:
        former = self._tries.setdefault(entry.kind, Trie()).insert(entry.tokens, entry)
        if former is not None:
            del self._entries[former]
        self._entries[entry] = None

    def _evict(self) -> None:
        held = self._nbytes()
        while self._entries and held > self.max_bytes:
            entry, before = next(iter(self._entries)), held
            self._remove(entry)
            held = self._nbytes()
            if events.listeners:
                place = ON_DISK if entry.cache is None else ""
                events.emit(events.CacheEvent("evicted", entry.backend, None, len(entry.tokens), before - held, place))

    def _remove(self, entry: _Entry) -> None:
        self._forget(entry)
        if entry.path is not None:
            entry.path.unlink(missing_ok=True)

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry]
        self._tries[entry.kind].remove(entry.tokens)

    def _nbytes(self) -> int:
        here: dict[str, torch.Tensor] = {}
        total = 0
        for number, entry in enumerate(self._entries):
            if entry.cache is None:
                total += entry.file_bytes
                continue
            for index, layer in enumerate(entry.cache.layers):
                if away := layer.elsewhere():
                    total += sum(each.nbytes for each in away)
                else:
                    here |= {f"{number}.{index}.{name}": tensor for name, tensor in layer.storage().items()}
        return total + sum(allocations(here).values())

    # --- the folder -----------------------------------------------------------------------------

    def _file_name(self, entry: _Entry) -> str:
        text = repr((self.fingerprint, entry.kind, entry.tokens))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() + SUFFIX

    def _find_files(self, folder: Path) -> None:
        for path in sorted(folder.glob(FILES), key=lambda each: each.stat().st_mtime_ns):
            try:
                found = describe(path)
            except (SnapshotError, OSError) as error:
                _warn(error)
                continue
            if found.fingerprint == self.fingerprint and found.token_ids:
                self._insert(_described(path, found, found.token_ids))
        self._evict()


def _described(path: Path, description: Description, token_ids: Sequence[int]) -> _Entry:
    recipe = description.recipe
    return _Entry(tuple(token_ids), _kind(recipe), recipe.name, None, path, path.stat().st_size)


def _kind(recipe: Recipe) -> str:
    """Return what caches must have in common to stand for each other; how long they were thought to get isn't."""
    return recipe.model_copy(update={"name": "", "max_length": None}).model_dump_json()


def _counts(cache: Cache) -> bool:
    """Return whether a cache counts its tokens, as states alone don't."""
    return any(isinstance(layer, AttentionLayer) for layer in cache.layers)


def _warn(error: Exception) -> None:
    logger.warning("prefix store: skipped: %s", error)
