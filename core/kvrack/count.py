"""TokenCount: how many tokens a preallocated layer has seen, as a compiled graph can carry it on."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kvrack.placement import DEVICE, keep_address


class TokenCount:
    """How many tokens were seen, in the two forms that a compiled graph can carry on from step to step.

    An int attribute would be a constant of the first graph that reads it. So the number is the
    shape of a tensor without elements, which a graph takes as a symbol and compares with sizes, and
    besides, once allocated, a value on the device, from which a graph computes positions without
    being made again for each.

    Attributes:
        position: the same number as an int64 tensor ``[]`` that keeps its address, None before `allocate`.
        is_known: False only inside torch.export, where the number is an input and `value` the
            largest that the exported program is for.
    """

    # Sizes 0 and 1 are never symbols to torch.compile.
    _SHIFT = 2

    def __init__(self) -> None:
        self.position: torch.Tensor | None = None
        self.is_known = True
        self._is_traced = False
        self._shape: torch.Tensor | None = None
        self._become(0)

    @property
    def value(self) -> int:
        """The number, symbolic while a graph is traced."""
        assert self._shape is not None
        return self._shape.shape[0] - self._SHIFT

    def allocate(self, device: torch.device) -> None:
        """Make `position` on `device`."""
        if self.position is None or self.position.device != device:
            self.position = DEVICE.allocate((), torch.int64, device).fill_(self.value)
            keep_address(self.position)

    def advance(self, tokens: int) -> None:
        """Count `tokens` more."""
        if self.position is not None:
            self.position.add_(tokens)
        if self.is_known:
            self._become(self.value + tokens)
        if torch.compiler.is_compiling():
            self._is_traced = True

    def set(self, value: int) -> None:
        """Make the number `value`."""
        if self.position is not None:
            self.position.fill_(value)
        self._become(value)

    def adopt(self, position: torch.Tensor, largest: int) -> None:
        """Take `position` for its own; while torch.export hides the number in it, take `largest` instead."""
        self.position = position
        self.is_known = _is_readable(position)
        self._become(int(position) if self.is_known else largest)

    def reread(self) -> None:
        """Take the number from `position`, which an exported program may have moved on."""
        if self.position is not None and self.is_known and _is_readable(self.position):
            self._become(int(self.position))

    def _become(self, value: int) -> None:
        shape = self._shape
        if shape is not None and not torch.compiler.is_compiling() and not shape.is_inference():
            # The same tensor, with its mark: a new one at every step and layer would cost more than writing the token.
            shape.resize_(value + self._SHIFT, 0)
            return
        self._shape = DEVICE.allocate((value + self._SHIFT, 0), torch.uint8, torch.device("cpu"))
        # Marked, so that the first graph has a symbol for it; from then on torch.compile knows, and a graph made
        # for what another graph left, which cannot be marked, would not take marked ones.
        if not torch.compiler.is_compiling() and not self._is_traced:
            torch._dynamo.maybe_mark_dynamic(self._shape, 0)


def _is_readable(tensor: torch.Tensor) -> bool:
    # torch.export hands out subclasses and works under modes, in part before it says that it compiles.
    return type(tensor) is torch.Tensor and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None
