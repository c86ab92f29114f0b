"""CacheEvent: what caches tell of themselves, and who is told.

With nobody listening an event costs the look at `listeners`, and none is looked at where tokens are appended to memory
that has room. A compiled graph tells nothing: what happens within it can't call back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

logger = logging.getLogger("kvrack.events")

EventKind = Literal["created", "grown", "flushed", "evicted", "spilled"]


@dataclass(frozen=True)
class CacheEvent:
    """Something that a cache, one of its layers or a store of caches did, just now.

    Attributes:
        kind: "created": a cache was built, loaded, forked or copied. "grown": one buffer of a layer took memory, its
            first or more than it had of its own. "flushed": one buffer of a layer encoded tokens. "evicted": a window
            let go of a layer's oldest tokens, or a `PrefixStore` of a whole entry. "spilled": one tensor's tokens were
            written to host memory or to a file, or a `PrefixStore` wrote an entry to its folder.
        backend: the name that the cache was asked for by.
        layer_index: position of the layer in its cache, None where it is about a whole cache.
        tokens: how many: seen, there is room for, encoded, let go of, written. None where they aren't counted.
        nbytes: how many: held by the cache, of the memory taken, of the codes, that became free (0 where a window
            slides in memory that it keeps), written.
        place: where these bytes are: a device ("cpu", "cuda:0"), "host" or "disk"; empty where it isn't one place.
    """

    kind: EventKind
    backend: str
    layer_index: int | None
    tokens: int | None
    nbytes: int
    place: str = ""


Listener = Callable[[CacheEvent], None]

listeners: tuple[Listener, ...] = ()
"""Who is told. Whoever has something to tell looks here first, so that nothing is computed for nobody."""

_lock = threading.Lock()
_plugins: tuple[Listener, ...] | None = None
"""Those of `listeners` that plugins brought; None as long as nobody looked for them."""


@dataclass(frozen=True)
class Origin:
    """Which layer of which cache something belongs to that has an event to tell.

    Attributes:
        backend: the name that the cache was asked for by.
        layer_index: position of the layer in its cache.
        rows: rows of the buffer that a token takes, below 1 where several share one.
    """

    backend: str
    layer_index: int
    rows: float = 1.0

    def tell(self, kind: EventKind, rows: int | None, nbytes: int, place: str) -> None:
        """Tell the listeners; see `CacheEvent`. `rows` are of the buffer, None where tokens aren't counted."""
        tokens = None if rows is None else round(rows / self.rows)
        emit(CacheEvent(kind, self.backend, self.layer_index, tokens, nbytes, place))


class Listening:
    """A listener that is told events until `stop()`, or to the end of a ``with`` block. See `listen`."""

    def __init__(self, listener: Listener) -> None:
        # A function of its own for each: the same listener may listen twice, and either may stop.
        self._told: Listener = lambda event: listener(event)
        _add(self._told)

    def stop(self) -> None:
        """Tell it no more. Stopping again does nothing."""
        _remove(self._told)

    def __enter__(self) -> Listening:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def listen(listener: Listener) -> Listening:
    """Call `listener` with each event from now on, of every cache in the process, until what is returned stops.

    It is called in the thread that did it, right after. One that raises is logged (``kvrack.events``) and told no
    more; what it was told of goes on. To listen in every process, install a plugin; see `kvrack.hookspecs`.

        with kvrack.listen(print):
            model.generate(...)
    """
    return Listening(listener)


def emit(event: CacheEvent) -> None:
    """Tell every listener."""
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            _remove(listener)
            logger.exception("a listener failed at %s; it is told no more", event)


def know_plugins() -> None:
    """Add the installed listeners, once. A plugin that is broken is logged and left out."""
    global _plugins
    if _plugins is not None:
        return
    from kvrack.registry import load_listeners

    found = load_listeners()
    with _lock:
        if _plugins is not None:
            return
        _plugins = found
    _add(*found)


def forget_plugins() -> None:
    """Look for installed listeners anew when the next cache is made."""
    global _plugins
    forgotten, _plugins = _plugins or (), None
    for listener in forgotten:
        _remove(listener)


def _add(*added: Listener) -> None:
    global listeners
    with _lock:
        listeners = (*listeners, *added)


def _remove(removed: Listener) -> None:
    global listeners
    with _lock:
        listeners = tuple(each for each in listeners if each is not removed)
