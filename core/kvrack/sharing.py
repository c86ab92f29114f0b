"""Sharing: which buffers hold one memory together, and how far each has claimed it.

A fork costs no copy: its buffers hold the memory of the buffers they were forked from. Whoever
then writes where another holds tokens takes a copy first; what lies behind everybody's tokens
belongs to the first who claims it. So the branch that goes on first goes on in place, as a slice of
an append-only array does, and only the others copy.
"""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakKeyDictionary

_LOCK = threading.RLock()
"""One for all: it is taken where memory is shared and nowhere else, for a few comparisons."""


class Sharing:
    """The holders of one memory. Safe under threads, as long as each holder is used by one at a time.

    A holder that has gone, or has memory of its own by now, counts no more.
    """

    lock = _LOCK

    def __init__(self) -> None:
        self._reach: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def join(self, holder: object, reach: int) -> None:
        """Count `holder` in, who holds slots up to `reach`."""
        with _LOCK:
            self._reach[holder] = reach

    def leave(self, holder: object) -> None:
        """Count `holder` out: it has memory of its own."""
        with _LOCK:
            self._reach.pop(holder, None)

    def claim(self, holder: object, first: int, reach: int) -> bool:
        """Return whether `holder` may write slots `first` to `reach`, which from then on are its own."""
        with _LOCK:
            if self.others(holder, first):
                return False
            self._reach[holder] = reach
            return True

    def others(self, holder: object, first: int) -> list[Any]:
        """Return the holders besides `holder` who hold slots from `first` on."""
        with _LOCK:
            return [other for other, reach in self._reach.items() if other is not holder and reach > first]
