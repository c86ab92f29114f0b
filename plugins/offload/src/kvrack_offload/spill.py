"""SpillFile: one file for all that a cache holds on disk, removed when the cache is gone."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch

from kvrack import MemoryRefused, OffloadError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL)


class SpillFile:
    """A file whose room is taken and given back in pieces.

    It is read and written with explicit calls and not mapped: a full disk or a truncated file is
    then an error where it happens, and not a signal that ends the process. Room is reserved before
    it is written, so that a disk that is full says so before anything is changed.

    The file is removed when the object goes, at the latest when Python ends, also after an
    exception.

    Args:
        folder: where to make it; None for a temporary folder of its own, which goes with it.

    Raises OffloadError when it can't be made there.
    """

    def __init__(self, folder: Path | None) -> None:
        try:
            own = tempfile.mkdtemp(prefix="kvrack-offload-") if folder is None else None
            self._fd, path = tempfile.mkstemp(dir=own or folder, prefix="kvrack-", suffix=".kv")
        except OSError as error:
            where = "the folder for temporary files" if folder is None else str(folder)
            raise OffloadError(
                f"no file can be made in {where}: {error}. Set folder to one that exists and can be written"
            ) from error
        self.path = Path(path)
        self._end = 0
        self._free: list[tuple[int, int]] = []
        self._is_whole = True
        weakref.finalize(self, _remove, self._fd, path, own, os.getpid())

    def take(self, size: int) -> tuple[int, int]:
        """Return the offset of room for `size` bytes, reserved on the disk, and how many they really are.

        Raises MemoryRefused when the disk, a quota or a limit has no room for it.
        """
        fitting = [each for each in self._free if size <= each[0] <= 2 * size]
        if fitting:
            best = min(fitting)
            self._free.remove(best)
            return best[1], best[0]
        self._check()
        try:
            self._reserve(size)
        except OSError as error:
            if error.errno not in _FULL:
                raise OffloadError(f"offload file {self.path} can't grow: {error}") from error
            raise MemoryRefused(
                f"no room for {size} more bytes in offload file {self.path}, which has {self._end}: {error.strerror}. "
                "Free some, or set folder to another disk; what is held is kept"
            ) from error
        offset = self._end
        self._end += size
        return offset, size

    def _reserve(self, size: int) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, self._end, size)
                return
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
        os.ftruncate(self._fd, self._end + size)

    def give_back(self, offset: int, size: int) -> None:
        """Take back room that `take` returned."""
        self._free.append((size, offset))

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Write `data`, contiguous uint8 in host memory, at `offset`."""
        self._check()
        left = data.numpy().data
        try:
            while left:
                written = os.pwrite(self._fd, left, offset)
                offset, left = offset + written, left[written:]
        except OSError as error:
            refused = MemoryRefused if error.errno in _FULL else OffloadError
            raise refused(f"offload file {self.path} can't be written: {error}; what was held is kept") from error

    def read(self, offset: int, out: torch.Tensor) -> None:
        """Read the bytes at `offset` into `out`, contiguous uint8 in host memory."""
        self._check()
        left = out.numpy().data
        try:
            while left:
                count = os.preadv(self._fd, [left], offset)
                if count == 0:
                    self._is_whole = False
                    self._check()
                offset, left = offset + count, left[count:]
        except OffloadError:
            raise
        except OSError as error:
            raise OffloadError(f"offload file {self.path} can't be read: {error}") from error

    def _check(self) -> None:
        # Before each use: once written to again, a truncated file would read as zeros.
        # The end first: another thread may make room in between.
        end = self._end
        if self._is_whole and os.fstat(self._fd).st_size < end:
            self._is_whole = False
        if not self._is_whole:
            raise OffloadError(
                f"offload file {self.path} was truncated by something else: {self._end} bytes were written, "
                f"{os.fstat(self._fd).st_size} are left. What the cache held there is lost; build a new one"
            )


def _remove(fd: int, path: str, own_folder: str | None, process: int) -> None:
    # A forked process has the file open too, but it isn't its own.
    os.close(fd)
    if os.getpid() != process:
        return
    with contextlib.suppress(OSError):
        os.unlink(path)
    if own_folder is not None:
        shutil.rmtree(own_folder, ignore_errors=True)
