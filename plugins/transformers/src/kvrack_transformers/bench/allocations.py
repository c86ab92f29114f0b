"""Peak of the memory that tensors take, on any device, also where the allocator keeps no count."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of every tensor that is made while it is active, until that tensor is gone.

    What an operator takes and frees within itself isn't seen, nor is memory that isn't a tensor's. A
    tensor made while it is active is counted down whenever it goes, so that the same object can be
    entered again and again.

    Args:
        known: tensors that are there before and stay, such as weights; views of them aren't counted.

    Attributes:
        now: bytes counted now.
        peak: the most there were since it was made, or since `peak` was last set.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        for each in returned if isinstance(returned, (tuple, list)) else (returned,):
            if isinstance(each, torch.Tensor):
                for part in plain(each):
                    self._note(part.untyped_storage())
        return returned

    def _note(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()
        if address == 0 or address in self._live or address in self._known:
            return
        size = self._live[address] = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        # torch keeps the Python object of a storage for as long as any tensor uses its memory.
        weakref.finalize(storage, self._gone, address).atexit = False

    def _gone(self, address: int) -> None:
        self.now -= self._live.pop(address)


def plain(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that hold the memory of one, which may be a wrapper of several."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return [tensor]
    return [inner for name in flatten()[0] for inner in plain(getattr(tensor, name))]
