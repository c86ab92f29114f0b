"""Prefetcher: which layer is brought to the device when, and into which of its two slots. Station: one layer's part.

The order of layers is learned from the updates themselves: the layer that followed this one last
time is brought while this one computes. So layers that stay on the device, hold nothing, or are
passed over need no telling, and a guess that proves wrong costs time, never tokens.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from kvrack import OffloadError, Placement
from kvrack.buffer import PlainTokens
from kvrack.events import Origin
from kvrack.fixed import PlainFixedTokens
from kvrack.scratch import Scratch
from kvrack_offload.homes import DiskHome, Home, HostHome, Traffic
from kvrack_offload.lanes import CpuLane, Job, Lane, StagedLane, StreamLane, Ticket
from kvrack_offload.spill import SpillFile

Tier = Literal["host", "disk"]
SLOTS = 2
"""Layers that are on the device at once: the one that computes and the one that comes next."""


class Part(ABC):
    """Something a layer holds elsewhere, and the copy of it that is on the device, if any."""

    home: Home[Any] | None = None

    @abstractmethod
    def device(self) -> torch.device | None:
        """Return where it is brought; None while it holds nothing."""

    @abstractmethod
    def begin(self, room: int) -> list[Job]:
        """Return what has to be read to have it on the device, with room for as many more tokens, and count
        it as there: `Station` waits before anything reads it."""

    @abstractmethod
    def forget(self) -> None:
        """Give up the copy on the device."""

    @abstractmethod
    def marks(self) -> tuple[Any, ...]:
        """Return what, beside the bytes elsewhere, says what is held. The first of them is the home."""

    @abstractmethod
    def set_marks(self, marks: tuple[Any, ...]) -> None:
        """Hold again what was held when `marks` was returned; nothing may have been given back since."""

    @abstractmethod
    def trim(self) -> None:
        """Give back room that only bytes took that are held no more."""


class Places:
    """The prefetchers of one cache: one for each place that its layers are held in."""

    def __init__(self) -> None:
        self._prefetchers: dict[tuple[Tier, Path | None], Prefetcher] = {}

    def prefetcher(self, scratch: Scratch, tier: Tier, folder: Path | None) -> Prefetcher:
        """Return the cache's prefetcher of this place; see `Prefetcher` for the arguments."""
        key = (tier, folder)
        if key not in self._prefetchers:
            self._prefetchers[key] = Prefetcher(scratch, tier, folder)
        return self._prefetchers[key]


class Prefetcher:
    """What the layers of one cache share that are held in one place: slots, lanes, file, order of updates.

    Args:
        scratch: the cache's, in which the slots are.
        tier: where bytes are held.
        folder: of the file, for tier disk.
    """

    def __init__(self, scratch: Scratch, tier: Tier, folder: Path | None) -> None:
        self.scratch = scratch
        self.tier = tier
        self.folder = folder
        self.traffic = Traffic()
        self.slot_name = scratch.own_slot("offload")
        self.new_tokens = 1
        """Tokens of the update under way, for which what is brought leaves room."""
        self._file: SpillFile | None = None
        self._lanes: dict[torch.device, Lane] = {}
        self._seats: dict[torch.device, list[weakref.ref[Station] | None]] = {}
        self._current: weakref.ref[Station] | None = None
        self._next: weakref.WeakKeyDictionary[Station, weakref.ref[Station]] = weakref.WeakKeyDictionary()

    def new_home(self, device: torch.device) -> Home[Any]:
        """Return a new home for what is brought to `device`."""
        if self.tier == "host":
            return HostHome(self.traffic, pinned=device.type != "cpu")
        if self._file is None:
            self._file = SpillFile(self.folder)
        return DiskHome(self.traffic, self._file)

    def lane(self, device: torch.device) -> Lane:
        """Return the lane of `device`."""
        if device not in self._lanes:
            self._lanes[device] = self._new_lane(device)
        return self._lanes[device]

    def _new_lane(self, device: torch.device) -> Lane:
        if device.type == "cpu":
            return CpuLane()
        return StreamLane(device) if self.tier == "host" else StagedLane(device)

    def enter(self, station: Station, new_tokens: int) -> None:
        """Note that `station` is updated now, with so many tokens, have it on the device, and begin to bring the
        one that comes next."""
        self.new_tokens = new_tokens
        before = self._current() if self._current is not None else None
        if before is not None and before is not station:
            self._next[before] = weakref.ref(station)
        self._current = weakref.ref(station)
        station.bring()
        following = self._next.get(station)
        after = following() if following is not None else None
        if after is not None and after is not station:
            after.begin()

    def seat(self, station: Station, device: torch.device) -> int:
        """Return a slot on `device` for `station`, taken from a layer that isn't being updated."""
        seats = self._seats.setdefault(device, [None] * SLOTS)
        current = self._current() if self._current is not None else None
        owners = [each() if each is not None else None for each in seats]
        taken = [owner if owner is not None and owner.slot == (device, i) else None for i, owner in enumerate(owners)]
        free = [i for i, each in enumerate(taken) if each is None]
        slot = free[0] if free else next(i for i, each in enumerate(taken) if each is not current)
        if (owner := taken[slot]) is not None:
            owner.vacate()
        seats[slot] = weakref.ref(station)
        return slot


class Station(Placement):
    """The placement of one layer: it gives out buffers that are held elsewhere, and moves them together.

    Args:
        prefetcher: of the cache.
        origin: the layer, as its events name it.
    """

    def __init__(self, prefetcher: Prefetcher, origin: Origin) -> None:
        self.prefetcher = prefetcher
        self.origin = origin
        self.is_active = False
        """Whether the layer is being updated, so that buffers show what is in the slot."""
        self.shapes_only = False
        """Whether buffers show tensors of the right shape and nothing in them, and leave what they hold alone."""
        self.on_vacate: Callable[[], None] | None = None
        self._parts: dict[int, weakref.ref[Part]] = {}
        self.slot: tuple[torch.device, int] | None = None
        """The device and the slot on it that the layer has for now."""
        self._ticket: Ticket | None = None

    # --- what is in it --------------------------------------------------------------------------

    def add(self, part: Part) -> int:
        """Return the number of a new part, which nobody else in the layer has."""
        number = next(n for n in range(len(self._parts) + 1) if n not in self._parts or self._parts[n]() is None)
        self._parts[number] = weakref.ref(part)
        return number

    def parts(self) -> list[Part]:
        """Return the parts that are in use."""
        return [part for each in self._parts.values() if (part := each()) is not None]

    @property
    def was_given_out(self) -> bool:
        """Whether any buffer was ever asked for."""
        return bool(self._parts)

    def buffer(self, growth: float, limit: int | None, is_whole: bool = False) -> PlainTokens:
        from kvrack_offload.buffers import HeldBuffer

        return HeldBuffer(self, limit, is_whole)

    def fixed_buffer(self, slots: int, is_ring: bool) -> PlainFixedTokens:
        from kvrack_offload.buffers import HeldFixed

        return HeldFixed(self, slots)

    # --- coming to the device -------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to bring what isn't on the device yet."""
        device = next((device for part in self.parts() if (device := part.device()) is not None), None)
        if self._ticket is not None or device is None:
            return
        jobs = [job for part in self.parts() for job in part.begin(self.prefetcher.new_tokens)]
        if jobs:
            self._ticket = self.prefetcher.lane(device).fetch(jobs)

    def bring(self) -> None:
        """Have everything on the device. Raises OffloadError when it can't be read."""
        self.settle()
        self.begin()
        self.settle()

    def settle(self) -> None:
        """Wait for what is on its way. Raises OffloadError when it can't be read."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            try:
                ticket.wait()
            except BaseException:
                self.forget()
                raise

    def forget(self) -> None:
        """Give up what is on the device; what was on its way counts no more, however that ended."""
        if self._ticket is not None:
            with contextlib.suppress(OffloadError):
                self.settle()
        for part in self.parts():
            part.forget()

    def vacate(self) -> None:
        """Give up what is on the device, and the slot."""
        self.forget()
        self.slot = None
        if self.on_vacate is not None:
            self.on_vacate()

    def take(self, number: int, nbytes: int, device: torch.device, most: int | None = None) -> torch.Tensor:
        """Return memory of the slot for part `number`, uint8 ``[nbytes]``: what it had before, if as much fits.

        `most` is how many bytes will ever be asked for, None when unknown.
        """
        if self.slot is None or self.slot[0] != device:
            self.slot = (device, self.prefetcher.seat(self, device))
        return self.prefetcher.scratch.take(
            f"{self.prefetcher.slot_name}.{self.slot[1]}.{number}", (nbytes,), torch.uint8, device, most
        )

    # --- changing as a whole --------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Within it, everything that the parts hold is changed, or, after an exception, nothing."""
        if not self.is_active:
            self.forget()
        before = {part: part.marks() for part in self.parts()}
        try:
            yield
        except BaseException:
            self.forget()
            for part in self.parts():
                home = part.home
                if part in before:
                    part.set_marks(before[part])
                elif home is not None:
                    part.set_marks((None,))
                if home is not None and home is not part.home:
                    home.close()
            raise
        for part, marks in before.items():
            if marks[0] is not None and marks[0] is not part.home:
                marks[0].close()
        for part in self.parts():
            part.trim()

    def has_changed(self, before: dict[Part, tuple[Any, ...]]) -> bool:
        """Return whether any part's marks differ from `before`."""
        return any(part not in before or part.marks() != before[part] for part in self.parts())

    @contextlib.contextmanager
    def showing_shapes(self) -> Iterator[None]:
        """Within it, buffers answer with shapes only, and are not changed."""
        self.shapes_only = True
        try:
            yield
        finally:
            self.shapes_only = False
