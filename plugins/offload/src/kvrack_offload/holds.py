"""Holds: what a layer holds elsewhere, through the buffers it asked for or through its storage()."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import torch

from kvrack import events
from kvrack.layer import CacheLayer, Elsewhere
from kvrack_offload.lanes import Job
from kvrack_offload.prefetch import Part, Station

Layer = TypeVar("Layer", bound=CacheLayer)


class Hold(ABC, Generic[Layer]):
    """An inner layer, and its bytes elsewhere.

    Args:
        inner: the layer, new and empty.
        station: its placement.
    """

    def __init__(self, inner: Layer, station: Station) -> None:
        self.inner = inner
        self.station = station

    @contextlib.contextmanager
    def updating(self, new_tokens: int) -> Iterator[Layer]:
        """Give the inner layer to be updated, everything it holds on the device. What is changed is held
        elsewhere at the end; after an exception all is as it was."""
        station = self.station
        station.prefetcher.enter(station, new_tokens)
        station.is_active = True
        try:
            with self.changing() as inner:
                yield inner
        finally:
            station.is_active = False

    @abstractmethod
    def changing(self) -> contextlib.AbstractContextManager[Layer]:
        """Give the inner layer to be changed in another way, else as `updating`."""

    @abstractmethod
    def reading(self) -> Layer:
        """Return the inner layer to be read."""

    @abstractmethod
    def shapes(self) -> dict[str, torch.Tensor]:
        """Return tensors as of `storage()`, with nothing in them."""

    def elsewhere(self) -> list[Elsewhere]:
        """Return the bytes elsewhere, by role, and the room for more."""
        homes = [part.home for part in self.station.parts() if part.home is not None]
        if not homes:
            return []
        held, place = [], homes[0].place
        room = sum(home.nbytes for home in homes)
        for name, shape in self.shapes().items():
            nbytes, here = shape.numel() * shape.dtype.itemsize, shape.untyped_storage().nbytes()
            if here > shape.dtype.itemsize:
                # Memory of more than one element is no shape: a small tensor that the layer keeps by itself.
                held.append(Elsewhere(name, str(shape.device), max(here, nbytes)))
            else:
                held.append(Elsewhere(name, place, nbytes))
                room -= nbytes
        return [*held, Elsewhere("room", place, max(0, room))]


class BufferHold(Hold[Layer]):
    """Of a layer that keeps its tokens in buffers from its build context: only new tokens travel out."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[Layer]:
        station, numbers = self.station, self.inner.metadata()
        before = {part: part.marks() for part in station.parts()}
        has_changed = False
        try:
            with station.transaction():
                try:
                    yield self.inner
                except BaseException:
                    has_changed = station.has_changed(before)
                    raise
        except BaseException:
            if has_changed:
                self._put_back(before, numbers)
            raise

    def _put_back(self, before: dict[Part, tuple[Any, ...]], numbers: dict[str, int]) -> None:
        """Make of the inner layer what it was. The bytes are as they were; what it keeps beside them is put back
        the way a snapshot is."""
        if all(marks[0] is None for marks in before.values()):
            self.inner = self.inner.twin()
            self.inner.restore({}, numbers)
        else:
            with self.station.showing_shapes():
                self.inner.restore(self.inner.storage(), numbers)

    def reading(self) -> Layer:
        return self.inner

    def shapes(self) -> dict[str, torch.Tensor]:
        with self.station.showing_shapes():
            return self.inner.storage()


class Blob(Part):
    """A tensor of any shape, elsewhere."""

    def __init__(self, station: Station) -> None:
        self._station = station
        self._number = station.add(self)
        self.like: torch.Tensor | None = None
        """A tensor of the same shape, dtype and device with nothing in it."""
        self._first = 0
        self._memory: torch.Tensor | None = None
        self.is_wanted = True
        """Whether it is to be brought; not while the layer has it already."""

    def device(self) -> torch.device | None:
        return None if self.like is None else self.like.device

    def marks(self) -> tuple[Any, ...]:
        return self.home, self.like, self._first

    def set_marks(self, marks: tuple[Any, ...]) -> None:
        self.home, self.like, self._first = marks if len(marks) > 1 else (None, None, 0)
        self.forget()

    def forget(self) -> None:
        self._memory = None

    def trim(self) -> None:
        if self.home is not None:
            self.home.drop(self._first)

    def begin(self, room: int) -> list[Job]:
        if self.like is None or self.home is None or self._memory is not None or not self.is_wanted:
            return []
        nbytes = self.like.numel() * self.like.dtype.itemsize
        self._memory = self._station.take(self._number, nbytes, self.like.device, most=nbytes)
        return [Job(self.home, self._first, self._memory)] if nbytes else []

    def read(self) -> torch.Tensor:
        """Return the tensor: the copy in the slot, after `Station.bring`."""
        assert self._memory is not None
        assert self.like is not None
        return self._memory.view(self.like.dtype).view(self.like.shape)

    def write(self, tensor: torch.Tensor) -> None:
        """Hold `tensor`, copied, beside what was held, which stays until all is well."""
        nbytes = tensor.numel() * tensor.dtype.itemsize
        if self.home is None:
            self.home, self._first = self._station.prefetcher.new_home(tensor.device), 0
        else:
            assert self.like is not None
            self._first += self.like.numel() * self.like.dtype.itemsize
        self.home.reserve(self._first + nbytes)
        self.like = torch.empty(1, dtype=tensor.dtype, device=tensor.device).expand(tensor.numel()).view(tensor.shape)
        flat = tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        self._station.prefetcher.lane(tensor.device).store(self.home, self._first, flat)
        if events.listeners:
            self._station.origin.tell("spilled", None, nbytes, self.home.place)


class StorageHold(Hold[Layer]):
    """Of any other layer: all it holds travels out after each update, and it is on the device only near its turn."""

    def __init__(self, inner: Layer, station: Station) -> None:
        super().__init__(inner, station)
        self._blobs: dict[str, Blob] = {}
        self._metadata = inner.metadata()
        self._is_loaded = True
        station.on_vacate = self._unload

    @contextlib.contextmanager
    def changing(self) -> Iterator[Layer]:
        inner = self.reading()
        blobs, metadata = dict(self._blobs), self._metadata
        try:
            with self.station.transaction():
                yield inner
                self._store()
        except BaseException:
            self._blobs, self._metadata = blobs, metadata
            self._unload()
            raise

    def reading(self) -> Layer:
        if not self._is_loaded:
            self._want(True)
            self.station.bring()
            self.inner.restore({name: blob.read() for name, blob in self._blobs.items()}, self._metadata)
            self._is_loaded = True
            self._want(False)
        elif self._blobs:
            self._sit()
        return self.inner

    def shapes(self) -> dict[str, torch.Tensor]:
        return {name: blob.like for name, blob in self._blobs.items() if blob.like is not None}

    def elsewhere(self) -> list[Elsewhere]:
        away = super().elsewhere()
        if away and self._is_loaded:
            away += [
                Elsewhere("loaded", str(tensor.device), tensor.untyped_storage().nbytes())
                for tensor in self.inner.storage().values()
            ]
        return away

    def _store(self) -> None:
        self._put_away()
        if self._blobs:
            self._sit()

    def _put_away(self) -> None:
        """Write what the inner layer holds elsewhere."""
        storage = self.inner.storage()
        self._blobs = {name: self._blobs.get(name) or Blob(self.station) for name in storage}
        for name, tensor in storage.items():
            self._blobs[name].write(tensor)
        self._metadata = self.inner.metadata()
        self._want(False)

    def _sit(self) -> None:
        """Take a slot, so that no more layers are loaded than there are slots."""
        device = next(iter(self._blobs.values())).device()
        assert device is not None
        self.station.take(0, 0, device)

    def _want(self, wanted: bool) -> None:
        for blob in self._blobs.values():
            blob.is_wanted = wanted
            blob.forget()

    def _unload(self) -> None:
        """Give up what the inner layer has on the device."""
        self._want(True)
        if self._blobs or self._is_loaded:
            self.inner = self.inner.twin()
        self._is_loaded = not self._blobs
        if self._is_loaded:
            self.inner.restore({}, self._metadata)


class StateHold(StorageHold[Layer]):
    """Of a layer of states: they travel out when the slot is needed, since a model may write to them in place."""

    @contextlib.contextmanager
    def changing(self) -> Iterator[Layer]:
        try:
            yield self.reading()
        finally:
            self._sit()

    def reading(self) -> Layer:
        if not self._is_loaded:
            super().reading()
        return self.inner

    def shapes(self) -> dict[str, torch.Tensor]:
        return self.inner.storage() if self._is_loaded else super().shapes()

    def elsewhere(self) -> list[Elsewhere]:
        # While the states are here they are the whole of it; what lies elsewhere is out of date.
        return [] if self._is_loaded else super().elsewhere()

    def _sit(self) -> None:
        if storage := self.inner.storage():
            self.station.take(0, 0, next(iter(storage.values())).device)

    def _unload(self) -> None:
        if self._is_loaded:
            with self.station.transaction():
                self._put_away()
        super()._unload()
