"""Lanes: how bytes travel between homes and one device, ahead of time and in order.

On the CPU a thread reads ahead. On an accelerator a side stream copies, ordered against the compute
stream by events: a copy into a slot waits for what had been asked of the device when it was
planned, and the layer that reads the slot waits for that copy alone.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from kvrack_offload.homes import Home

SHORT = 1 << 16
"""Bytes that are read sooner than a thread is asked to."""

STAGE = 1 << 23
"""Bytes of one staging buffer between a file and an accelerator."""


@dataclass(frozen=True)
class Job:
    """Bytes `first` and on of a home, to be read into `out`, contiguous uint8 ``[bytes]`` on the lane's device."""

    home: Home[Any]
    first: int
    out: torch.Tensor


class Ticket:
    """A journey that was begun. Nothing may read what it brings before `wait`."""

    def wait(self) -> None:
        """Return when the current stream may read what was brought. Raises what the journey met."""


@dataclass(frozen=True)
class _Journey(Ticket):
    """A journey on a thread, on a side stream of `device`, or on both."""

    future: Future[None] | None = None
    ready: torch.Event | None = None
    device: torch.device | None = None

    def wait(self) -> None:
        if self.future is not None:
            self.future.result()
        if self.ready is not None:
            torch.accelerator.current_stream(self.device).wait_event(self.ready)


class Lane(ABC):
    """What moves bytes to and from one device."""

    @abstractmethod
    def fetch(self, jobs: Sequence[Job]) -> Ticket:
        """Begin to read `jobs`, once the device has done what it was asked for so far."""

    @abstractmethod
    def store(self, home: Home[Any], first: int, data: torch.Tensor) -> None:
        """Write `data`, contiguous uint8 ``[bytes]`` on the device, as bytes `first` and on of `home`, which
        has room. The copy may still be under way when it returns; see `finish`."""

    @abstractmethod
    def finish(self) -> None:
        """Have the device wait, or wait, until what is being stored may be overwritten."""


class CpuLane(Lane):
    """A thread that reads ahead. What is stored is written at once, so that an error names its update."""

    def __init__(self) -> None:
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvrack-offload")

    def fetch(self, jobs: Sequence[Job]) -> Ticket:
        if sum(job.out.shape[0] for job in jobs) <= SHORT:
            _read(jobs)
            return Ticket()
        return _Journey(self._reader.submit(_read, jobs))

    def store(self, home: Home[Any], first: int, data: torch.Tensor) -> None:
        home.write(first, data)

    def finish(self) -> None:
        pass


def _read(jobs: Sequence[Job]) -> None:
    for job in jobs:
        job.home.read(job.first, job.out)


class StreamLane(Lane):
    """A side stream between pinned host memory and an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.Stream(device=device)
        self._stored: torch.Event | None = None

    def fetch(self, jobs: Sequence[Job]) -> Ticket:
        free, ready = self._mark(), torch.Event(device=self._device)
        with _on(self._side):
            self._side.wait_event(free)
            _read(jobs)
            ready.record(self._side)
        return _Journey(None, ready, self._device)

    def store(self, home: Home[Any], first: int, data: torch.Tensor) -> None:
        written = self._mark()
        with _on(self._side):
            self._side.wait_event(written)
            home.write(first, data)
            self._stored = torch.Event(device=self._device)
            self._stored.record(self._side)
        # Its memory may be given to somebody else before the copy is done.
        data.record_stream(self._side)

    def finish(self) -> None:
        if self._stored is not None:
            self._compute().wait_event(self._stored)

    def _compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)

    def _mark(self) -> torch.Event:
        """Return an event at the end of what the device was asked for."""
        event = torch.Event(device=self._device)
        event.record(self._compute())
        return event


class StagedLane(StreamLane):
    """A thread between a file and an accelerator, through two pinned buffers and a side stream.

    What is stored travels on the same thread, so that what is read after it finds it. Room for it
    was reserved before; what goes wrong all the same is raised at the next journey.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvrack-offload")
        self._stages: list[torch.Tensor] = []
        self._copied: list[torch.Event | None] = [None, None]
        self._turn = 0
        self._storing: list[Future[None]] = []

    def fetch(self, jobs: Sequence[Job]) -> Ticket:
        self._raise_failed()
        free, ready = self._mark(), torch.Event(device=self._device)
        return _Journey(self._thread.submit(self._bring, jobs, free, ready), ready, self._device)

    def store(self, home: Home[Any], first: int, data: torch.Tensor) -> None:
        self._raise_failed()
        self._storing.append(self._thread.submit(self._take_out, home, first, data, self._mark()))

    def finish(self) -> None:
        storing, self._storing = self._storing, []
        for each in storing:
            each.result()

    def _raise_failed(self) -> None:
        done = [each for each in self._storing if each.done()]
        self._storing = [each for each in self._storing if each not in done]
        for each in done:
            each.result()

    def _stage(self) -> torch.Tensor:
        """Return a staging buffer that no copy reads any more."""
        if not self._stages:
            with torch.inference_mode(False):
                self._stages = [torch.empty(STAGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._stages[self._turn]

    def _bring(self, jobs: Sequence[Job], free: torch.Event, ready: torch.Event) -> None:
        torch.accelerator.set_device_index(self._device.index or 0)
        with _on(self._side):
            self._side.wait_event(free)
            for job in jobs:
                for at in range(0, job.out.shape[0], STAGE):
                    out = job.out.narrow(0, at, min(STAGE, job.out.shape[0] - at))
                    stage = self._stage().narrow(0, 0, out.shape[0])
                    job.home.read(job.first + at, stage)
                    out.copy_(stage, non_blocking=True)
                    copied = torch.Event(device=self._device)
                    copied.record(self._side)
                    self._copied[self._turn] = copied
            ready.record(self._side)

    def _take_out(self, home: Home[Any], first: int, data: torch.Tensor, written: torch.Event) -> None:
        torch.accelerator.set_device_index(self._device.index or 0)
        with _on(self._side):
            self._side.wait_event(written)
            for at in range(0, data.shape[0], STAGE):
                part = data.narrow(0, at, min(STAGE, data.shape[0] - at))
                stage = self._stage().narrow(0, 0, part.shape[0])
                stage.copy_(part, non_blocking=True)
                copied = torch.Event(device=self._device)
                copied.record(self._side)
                copied.synchronize()
                home.write(first + at, stage)
        data.record_stream(self._side)


@contextlib.contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
