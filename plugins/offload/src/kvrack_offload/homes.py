"""Homes: bytes that lie elsewhere, in host memory or in a file, written and read in ranges.

Bytes are numbered from 0 and never move. Room is made in pieces, each larger than the last, so that
growing copies nothing and a range is read in a few long pieces.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from kvrack import MemoryRefused
from kvrack_offload.spill import SpillFile

UNIT = 1 << 16
"""Pieces are multiples of it: small enough for a code's scales, large enough to read in one go."""

Where = TypeVar("Where")


@dataclass
class Traffic:
    """Bytes that travelled between the device and elsewhere, for a whole cache.

    Attributes:
        out: bytes written elsewhere.
        back: bytes read from there.
    """

    out: int = 0
    back: int = 0


@dataclass(frozen=True)
class Piece(Generic[Where]):
    """Room for bytes `first` to ``first + size`` of a home, at `where` in what the home is made of."""

    first: int
    size: int
    where: Where


class Home(ABC, Generic[Where]):
    """Bytes elsewhere. Owned by one buffer; given back by `close`, or when it is forgotten."""

    place: str

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._pieces: list[Piece[Where]] = []
        self._end = 0

    @property
    def nbytes(self) -> int:
        """Bytes of room."""
        return sum(piece.size for piece in self._pieces)

    def reserve(self, end: int) -> None:
        """Make room up to byte `end`. Raises MemoryRefused when there is none; nothing is changed then."""
        if end > self._end:
            wanted = max(end - self._end, self.nbytes // 4)
            size = -(-wanted // UNIT) * UNIT
            where, size = self._new(size)
            self._pieces.append(Piece(self._end, size, where))
            self._end += size

    def write(self, first: int, data: torch.Tensor) -> None:
        """Write `data`, contiguous uint8 ``[bytes]``, as bytes `first` and on, for which there is room."""
        for piece, at, done, count in self._spans(first, data.shape[0]):
            self._put(piece.where, at, data.narrow(0, done, count))
        self._traffic.out += data.shape[0]

    def read(self, first: int, out: torch.Tensor) -> None:
        """Read bytes `first` and on into `out`, contiguous uint8 ``[bytes]``."""
        for piece, at, done, count in self._spans(first, out.shape[0]):
            self._get(piece.where, at, out.narrow(0, done, count))
        self._traffic.back += out.shape[0]

    def drop(self, below: int) -> None:
        """Give back the pieces that have nothing but bytes before `below`, which are not read again."""
        while self._pieces and self._pieces[0].first + self._pieces[0].size <= below:
            piece = self._pieces.pop(0)
            self._free(piece)

    def close(self) -> None:
        """Give back everything."""
        while self._pieces:
            self._free(self._pieces.pop())

    def _spans(self, first: int, count: int) -> Iterator[tuple[Piece[Where], int, int, int]]:
        """Yield each piece that has some of `count` bytes from `first` on, where in it they start, how many
        bytes come before them, and how many they are."""
        done = 0
        for piece in self._pieces:
            at = first + done - piece.first
            if done < count and 0 <= at < piece.size:
                here = min(count - done, piece.size - at)
                yield piece, at, done, here
                done += here
        assert done == count, f"bytes {first} to {first + count} are not all here"

    @abstractmethod
    def _new(self, size: int) -> tuple[Where, int]:
        """Return room for `size` bytes or some more, and how many."""

    @abstractmethod
    def _free(self, piece: Piece[Where]) -> None: ...

    @abstractmethod
    def _put(self, where: Where, at: int, data: torch.Tensor) -> None: ...

    @abstractmethod
    def _get(self, where: Where, at: int, out: torch.Tensor) -> None: ...


class HostHome(Home[torch.Tensor]):
    """Bytes in host memory. Copies are asynchronous where it is pinned: they belong to the current stream.

    Args:
        traffic: counts what travels.
        pinned: whether to pin the memory, which a device copies from and to by itself.
    """

    place = "host"

    def __init__(self, traffic: Traffic, pinned: bool) -> None:
        super().__init__(traffic)
        self._pinned = pinned

    def _new(self, size: int) -> tuple[torch.Tensor, int]:
        try:
            with torch.inference_mode(False):
                return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned), size
        except (RuntimeError, MemoryError) as error:
            raise MemoryRefused(
                f"no room for {size} bytes of {'pinned ' if self._pinned else ''}host memory: {error}. "
                "Use tier='disk', or fewer tokens"
            ) from error

    def _free(self, piece: Piece[torch.Tensor]) -> None:
        pass

    def _put(self, where: torch.Tensor, at: int, data: torch.Tensor) -> None:
        where.narrow(0, at, data.shape[0]).copy_(data, non_blocking=True)

    def _get(self, where: torch.Tensor, at: int, out: torch.Tensor) -> None:
        out.copy_(where.narrow(0, at, out.shape[0]), non_blocking=True)


class DiskHome(Home[int]):
    """Bytes in a file that homes share. Given and taken in host memory.

    Args:
        traffic: counts what travels.
        file: the file.
    """

    place = "disk"

    def __init__(self, traffic: Traffic, file: SpillFile) -> None:
        super().__init__(traffic)
        self._file = file
        weakref.finalize(self, _give_back, file, self._pieces).atexit = False

    def _new(self, size: int) -> tuple[int, int]:
        return self._file.take(size)

    def _free(self, piece: Piece[int]) -> None:
        self._file.give_back(piece.where, piece.size)

    def _put(self, where: int, at: int, data: torch.Tensor) -> None:
        self._file.write(where + at, data)

    def _get(self, where: int, at: int, out: torch.Tensor) -> None:
        self._file.read(where + at, out)


def _give_back(file: SpillFile, pieces: list[Piece[int]]) -> None:
    for piece in pieces:
        file.give_back(piece.where, piece.size)
