"""StateBuffer: the memory of one state. The only code that writes states."""

from __future__ import annotations

import torch

from kvrack import ShapeMismatch
from kvrack.placement import DEVICE, Placement, keep_address


class StateBuffer:
    """One state, batch first, of the shape, dtype and device of the first one written, and in place ever after.

    The buffer owns its memory; what is written is copied, detached.

    Args:
        placement: where the memory lives.
    """

    def __init__(self, placement: Placement = DEVICE) -> None:
        self.placement = placement
        self._data: torch.Tensor | None = None

    def view(self) -> torch.Tensor | None:
        """Return the state to read, None when none is held."""
        return self._data

    def writable(self) -> torch.Tensor | None:
        """Return the state for a model that may write to it, None when none is held."""
        return self._data

    def check(self, state: torch.Tensor, what: str) -> None:
        """Raise ShapeMismatch unless `state` can replace the one held. `what` names it in the text."""
        if self._data is not None and state.shape != self._data.shape:
            raise ShapeMismatch(
                f"{what}: the cache holds {tuple(self._data.shape)}, got {tuple(state.shape)}. "
                "Call batch_repeat_interleave or batch_select_indices first, or reset() to start anew"
            )

    def write(self, state: torch.Tensor) -> torch.Tensor:
        """Make `state` the one held, converted to the held one's dtype, and return it."""
        data = self._data
        if data is None:
            data = self._data = self.placement.allocate(state.shape, state.dtype, state.device)
            keep_address(data)
        data.copy_(state.detach())
        return data

    def restore(self, state: torch.Tensor) -> None:
        """Hold `state`, copied, whatever its shape, dtype and device; memory that fits it is written in place."""
        data = self._data
        if data is not None and (data.shape, data.dtype, data.device) != (state.shape, state.dtype, state.device):
            self.clear()
        self.write(state)

    def clear(self) -> None:
        """Forget the state and free the memory."""
        self._data = None
