"""Strip: rows of tokens that lie elsewhere, and the stretch of them that is on the device.

Elsewhere and in the slot a row is one token, ``[batch, heads, channels]``, so that tokens that come
are one write and tokens in order are one read; attention is shown the rows as a strided view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvrack import events
from kvrack.buffer import TOKENS
from kvrack.placement import DEVICE
from kvrack_offload.lanes import Job, Lane
from kvrack_offload.prefetch import Part, Station

PORTION = 1 << 23
"""Bytes of a long prompt that are laid out in rows at once."""


@dataclass(frozen=True)
class Form:
    """What the rows of a strip are: ``[batch, heads, channels]`` of this dtype, for this device."""

    batch: int
    heads: int
    channels: int
    dtype: torch.dtype
    device: torch.device

    @property
    def row(self) -> tuple[int, int, int]:
        return self.batch, self.heads, self.channels

    @property
    def row_bytes(self) -> int:
        return self.batch * self.heads * self.channels * self.dtype.itemsize

    def empty(self, tokens: int) -> torch.Tensor:
        """Return ``[batch, heads, tokens, channels]`` with nothing in it, in memory of one element."""
        one = torch.empty(1, 1, 1, 1, dtype=self.dtype, device=self.device)
        return one.expand(self.batch, self.heads, tokens, self.channels)


def form_of(states: torch.Tensor) -> Form:
    """Return the form of ``[batch, heads, tokens, channels]``."""
    return Form(states.shape[0], states.shape[1], states.shape[3], states.dtype, states.device)


class Strip(Part):
    """Tokens by number, from `start` to `stop`; of fixed rows, those up to `stop` are filled.

    Args:
        station: of the layer that holds them.
        slots: rows that there are elsewhere, token i in row i modulo `slots`; None where each has a
            row of its own and those before `start` are given back.
    """

    def __init__(self, station: Station, slots: int | None = None) -> None:
        self.station = station
        self.slots = slots
        self.limit = slots
        """Tokens that will be on the device together at the most, None when unknown; more may come."""
        self.origin: events.Origin | None = None
        """The layer that it belongs to, which its events name; None where nobody is told."""
        self.form: Form | None = None
        self.start = self.stop = 0
        self.shown: tuple[int, int] | None = None
        """First token and count that were last asked for, where that isn't all from `start` to `stop`."""
        self.unused: torch.Tensor | None = None
        """What is shown for a token past `stop`, ``[batch, heads, 1, channels]``; None for zeros."""
        self._memory: torch.Tensor | None = None
        self._first = self._count = 0
        self._number = station.add(self)

    def open(self, form: Form, tokens: int | None = None) -> None:
        """Hold rows of this form, none yet, with room for `tokens`. Raises MemoryRefused when there is none."""
        home = self.station.prefetcher.new_home(form.device)
        if tokens is not None:
            home.reserve(tokens * form.row_bytes)
        self.forget()
        self.home, self.form, self.shown = home, form, None
        self.start = self.stop = 0

    def shut(self) -> None:
        """Hold nothing. The room goes back when the transaction ends well."""
        self.set_marks((None,))

    # --- Part -----------------------------------------------------------------------------------

    def device(self) -> torch.device | None:
        return self.form.device if self.form is not None else None

    def marks(self) -> tuple[Any, ...]:
        return self.home, self.form, self.start, self.stop, self.shown

    def set_marks(self, marks: tuple[Any, ...]) -> None:
        self.home, self.form, self.start, self.stop, self.shown = marks if len(marks) > 1 else (None, None, 0, 0, None)
        self.forget()

    def forget(self) -> None:
        self._memory = None
        self._first = self._count = 0

    def trim(self) -> None:
        if self.home is not None and self.form is not None and self.slots is None:
            self.home.drop(self.start * self.form.row_bytes)

    def begin(self, room: int) -> list[Job]:
        first, count = self.shown if self.shown is not None else (self.start, self.stop - self.start)
        count = self._held(first, count)
        if self.form is None or count <= 0 or self._has(first, count):
            return []
        return self._bring(first, count, room)

    def cut(self) -> None:
        """Have no more on the device than up to `stop`."""
        self._count = max(0, min(self._count, self.stop - self._first))

    # --- tokens ---------------------------------------------------------------------------------

    def read(self, first: int, count: int, room: int = 0) -> torch.Tensor:
        """Return tokens `first` and on ``[batch, heads, count, channels]``, `unused` past `stop`.

        While the layer is updated a view of the slot, with room for more behind it; else a copy.
        """
        form = self._form()
        if self.station.shapes_only:
            return form.empty(count)
        held = self._held(first, count)
        if not self.station.is_active:
            with torch.inference_mode(False):
                memory = DEVICE.allocate((count, *form.row), form.dtype, form.device)
                self._wait(self._jobs(first, held, memory))
                self._blank(memory.narrow(0, held, count - held))
            return _as_states(memory)
        if not self._has(first, held):
            self._wait(self._bring(first, held, count - held + room))
        memory = self._with_room(first + count, room)
        if count > held:
            self._blank(memory.narrow(0, first + held - self._first, count - held))
        return _as_states(memory.narrow(0, first - self._first, count))

    def write(self, states: torch.Tensor, first: int, show: bool = False) -> None:
        """Hold `states` ``[batch, heads, tokens, channels]`` as tokens `first` and on, elsewhere, and on the
        device where the tokens before them are, or where `show` says that they are read next."""
        form, new = self._form(), states.shape[TOKENS]
        if self.slots is not None and new > self.slots:
            first, states, new = (
                first + new - self.slots,
                states.narrow(TOKENS, new - self.slots, self.slots),
                self.slots,
            )
        if new == 0 or self.station.shapes_only:
            return
        assert self.home is not None
        if self.slots is None:
            self.home.reserve((first + new) * form.row_bytes)
        rows = states.detach().permute(TOKENS, 0, 1, 3)
        follows = self._memory is not None and self._first <= first <= self._first + self._count
        if self.station.is_active and (follows or (show and first >= self.stop and self.stop == self.start)):
            if not follows:
                self._lane.finish()
                self._memory, self._first, self._count = self._take(new), first, 0
            memory = self._with_room(first + new, 0)
            at = first - self._first
            memory.narrow(0, at, new).copy_(rows)
            self._count = max(self._count, at + new)
            self._store(memory.narrow(0, at, new), first)
        else:
            self.forget()
            portion = max(1, PORTION // max(1, form.row_bytes))
            for at in range(0, new, portion):
                part = rows.narrow(0, at, min(portion, new - at))
                # The caller's own memory would not be safe to copy from once this returns.
                copies = not part.is_contiguous() or form.device.type == "cpu"
                self._store(part.contiguous() if copies else part.clone(), first + at)
        end = max(self.stop, first + new)
        self.stop = end if self.slots is None else min(end, self.slots)
        if events.listeners and self.origin is not None:
            self.origin.tell("spilled", new, new * form.row_bytes, self.home.place)

    def _blank(self, rows: torch.Tensor) -> None:
        """Make of `rows` what is past `stop`."""
        if self.unused is None:
            rows.zero_()
        else:
            rows.copy_(self.unused.permute(TOKENS, 0, 1, 3))

    # --- bytes ----------------------------------------------------------------------------------

    def _form(self) -> Form:
        assert self.form is not None, "used before memory was asked for"
        return self.form

    def _held(self, first: int, count: int) -> int:
        """Return how many of `count` tokens from `first` on there are."""
        if self.slots is not None and self.stop == self.slots:
            return count
        return max(0, min(count, self.stop - first))

    def _has(self, first: int, count: int) -> bool:
        """Return whether these tokens are on the device."""
        if count == 0:
            return self._memory is not None and self._first <= first <= self._first + self._count
        return self._memory is not None and self._first <= first and first + count <= self._first + self._count

    @property
    def _lane(self) -> Lane:
        return self.station.prefetcher.lane(self._form().device)

    def _take(self, rows: int) -> torch.Tensor:
        form = self._form()
        # Memory outlives the mode it is first asked for in.
        with torch.inference_mode(False):
            most = None if self.limit is None or rows > self.limit else self.limit * form.row_bytes
            memory = self.station.take(self._number, rows * form.row_bytes, form.device, most)
            return memory.view(form.dtype).view(rows, *form.row)

    def _bring(self, first: int, count: int, room: int) -> list[Job]:
        # The old memory goes first: both at once would double the peak.
        self._memory = None
        self._memory, self._first, self._count = self._take(count + room), first, count
        return self._jobs(first, count, self._memory)

    def _with_room(self, end: int, room: int) -> torch.Tensor:
        """Return the memory on the device, made such that it reaches to token `end`."""
        memory = self._memory
        assert memory is not None
        if end - self._first <= memory.shape[0]:
            return memory
        oldest = self.start if self.slots is None else end - self.slots
        first = min(max(self._first, oldest), self._first + self._count)
        dead, live = first - self._first, self._first + self._count - first
        self._lane.finish()
        larger = self._take(end - first + room)
        if larger.data_ptr() != memory.data_ptr():
            larger.narrow(0, 0, live).copy_(memory.narrow(0, dead, live))
        elif dead:
            # Source and target may overlap, which copy_ does not allow.
            larger.narrow(0, 0, live).copy_(memory.narrow(0, dead, live).clone())
        self._memory, self._first, self._count = larger, first, live
        return larger

    def _jobs(self, first: int, count: int, memory: torch.Tensor) -> list[Job]:
        """Return the reads that bring `count` tokens to the front of `memory`."""
        assert self.home is not None
        size = self._form().row_bytes
        with torch.inference_mode(False):
            flat = _as_bytes(memory.narrow(0, 0, count))
        return [
            Job(self.home, row * size, flat.narrow(0, done * size, rows * size))
            for row, done, rows in self._runs(first, count)
            if size
        ]

    def _store(self, rows: torch.Tensor, first: int) -> None:
        assert self.home is not None
        size, lane = self._form().row_bytes, self._lane
        flat = _as_bytes(rows)
        for row, done, count in self._runs(first, rows.shape[0]):
            lane.store(self.home, row * size, flat.narrow(0, done * size, count * size))

    def _runs(self, first: int, count: int) -> list[tuple[int, int, int]]:
        """Return, for tokens in order, the rows they are in: first row, tokens before, tokens."""
        if self.slots is None:
            return [(first, 0, count)] if count else []
        row = first % self.slots if self.slots else 0
        before_end = min(count, self.slots - row)
        runs = [(row, 0, before_end), (0, before_end, count - before_end)]
        return [run for run in runs if run[2]]

    def _wait(self, jobs: list[Job]) -> None:
        if jobs:
            self._lane.fetch(jobs).wait()


def _as_states(rows: torch.Tensor) -> torch.Tensor:
    """Return rows ``[tokens, batch, heads, channels]`` as ``[batch, heads, tokens, channels]``."""
    return rows.permute(1, 2, 0, 3)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.reshape(-1).view(torch.uint8)
