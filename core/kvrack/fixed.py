"""Memory of a fixed size and address: FixedBuffer, RingBuffer, and TokenCount, the length beside them.

Buffers here do not know how many tokens they hold. The layer does, in one `TokenCount` for both of
its buffers, so that a compiled graph has one number to carry.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from kvrack.buffer import TOKENS
from kvrack.placement import DEVICE, Placement
from kvrack.sharing import Sharing

MIN_VIEW = 256
"""Slots of the shortest prefix that attention is given, where capacity allows."""


def view_size(tokens: int, capacity: int) -> int:
    """Return how many slots to show when `tokens` are held: the least power of two from `MIN_VIEW` that
    holds them, at most `capacity`.

    A few sizes and not the exact number, so that a compiled model meets few shapes.
    """
    size = MIN_VIEW
    while size < capacity:
        if tokens <= size:
            return size
        size *= 2
    return capacity


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
        self._become(0)

    @property
    def value(self) -> int:
        """The number, symbolic while a graph is traced."""
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
        self._shape = DEVICE.allocate((value + self._SHIFT, 0), torch.uint8, torch.device("cpu"))
        # Marked, so that the first graph has a symbol for it; from then on torch.compile knows, and a graph made
        # for what another graph left, which cannot be marked, would not take marked ones.
        if not torch.compiler.is_compiling() and not self._is_traced:
            torch._dynamo.maybe_mark_dynamic(self._shape, 0)


def _is_readable(tensor: torch.Tensor) -> bool:
    # torch.export hands out subclasses and works under modes, in part before it says that it compiles.
    return type(tensor) is torch.Tensor and not torch.compiler.is_compiling() and _get_current_dispatch_mode() is None


def keep_address(tensor: torch.Tensor) -> None:
    """Tell torch.compile that `tensor` stays where it is, so that CUDA graphs may write to it."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


class FixedBuffer:
    """Tokens ``[batch, heads, slots, channels]``, token i in slot i, written in place.

    The buffer owns its memory; tensors given to it are copied, detached. Memory is zeroed, since
    attention multiplies slots that a mask hides by zero, which must not meet NaN.

    Args:
        slots: tokens it has room for.
        placement: where the memory lives.
    """

    copies = 1
    """How often the memory has each slot."""

    def __init__(self, slots: int, placement: Placement = DEVICE) -> None:
        self.slots = slots
        self.placement = placement
        self.data: torch.Tensor | None = None
        self._sharing: Sharing | None = None
        self._is_borrowed = False

    def fits(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Return whether the memory there is serves states of this shape, dtype and device."""
        data = self.data
        return (
            data is not None
            and data.shape[0] == batch
            and data.shape[1] == heads
            and data.shape[3] == channels
            and data.dtype == dtype
            and data.device == device
        )

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make memory for states of this shape, dtype and device; what is there and fits stays."""
        if self.fits(batch, heads, channels, dtype, device):
            return
        # The old memory goes first: both at once would double the peak.
        self.let_go()
        shape = (batch, heads, self.copies * self.slots, channels)
        self.data = self.placement.allocate(shape, dtype, device).zero_()
        keep_address(self.data)

    def allocate_for(self, states: torch.Tensor) -> None:
        """Make memory for `states` ``[batch, heads, tokens, channels]`` and what is like them."""
        self.allocate(states.shape[0], states.shape[1], states.shape[3], states.dtype, states.device)

    def write(self, states: torch.Tensor, first: int, position: torch.Tensor) -> None:
        """Write `states` as tokens `first` and on; `position` is `first` on the device."""
        if self._is_borrowed:
            self._own()
        data, new = self._memory(), states.shape[TOKENS]
        if torch.compiler.is_compiling():
            data.index_copy_(TOKENS, position + torch.arange(new, device=position.device), states.detach())
        else:
            data.narrow(TOKENS, first, new).copy_(states.detach())

    def view(self, first: int, count: int) -> torch.Tensor:
        """Return tokens `first` and on, ``[batch, heads, count, channels]``; slots that hold none, where there are."""
        return self._memory().narrow(TOKENS, first, count)

    def restore(self, tokens: torch.Tensor, first: int = 0) -> None:
        """Write `tokens`, as ``view(first, count)`` returned them, to memory that fits them."""
        self.release()
        self.allocate_for(tokens)
        self.view(first, tokens.shape[TOKENS]).copy_(tokens.detach())

    # --- sharing --------------------------------------------------------------------------------

    def share(self, other: FixedBuffer, held: int) -> None:
        """Show what `other` shows, in its memory: borrowed, and copied before the first write here.

        The memory's owner writes on in place, behind the tokens that it lent, and keeps its address.

        Args:
            other: an equal buffer, the owner or another borrower.
            held: tokens that it holds.
        """
        self.data = other.data
        if self.data is None:
            return
        if other._sharing is None:
            other._sharing = Sharing()
        self._sharing, self._is_borrowed = other._sharing, True
        self._sharing.join(self, held)

    def take_back(self, first: int) -> None:
        """Be ready to write tokens `first` and on anew: who borrowed them gets a copy of the memory."""
        if self._sharing is not None and not self._is_borrowed:
            with Sharing.lock:
                for borrower in self._sharing.others(self, first):
                    borrower._own()

    def release(self) -> None:
        """Forget what is held: memory of its own stays for the next tokens, borrowed memory is given back."""
        self.take_back(0)
        if self._is_borrowed:
            self.let_go()

    def own(self) -> None:
        """Have memory that nobody else shows."""
        if self._is_borrowed:
            self._own()
        self.take_back(0)

    def let_go(self) -> None:
        """Give up the memory, which lives on if others borrowed it."""
        if self._sharing is not None and not torch.compiler.is_compiling():
            self._sharing.leave(self)
        self._sharing, self._is_borrowed, self.data = None, False, None

    def _own(self) -> None:
        """Take a copy of the memory; it happens at most once, whoever asks first."""
        if torch.compiler.is_compiling():
            self._copy_out()
            return
        with Sharing.lock:
            if self._sharing is not None:
                self._copy_out()

    def _copy_out(self) -> None:
        shared = self._memory()
        copied = self.placement.allocate(shared.shape, shared.dtype, shared.device).copy_(shared)
        keep_address(copied)
        self.let_go()
        self.data = copied

    def _memory(self) -> torch.Tensor:
        assert self.data is not None, "used before allocate()"
        return self.data


class RingBuffer(FixedBuffer):
    """The newest `slots` tokens, token i in slot i modulo `slots`, each slot twice in memory.

    The second copy follows the first, so that the tokens from any slot on are one strided view,
    oldest first: nothing is rolled or copied to show a full window. Softmax would not mind another
    order, but masks do: they tell padding, and the chunks of chunked attention, by position. The
    price is memory for twice the window.
    """

    copies = 2

    def write(self, states: torch.Tensor, first: int, position: torch.Tensor) -> None:
        new = states.shape[TOKENS]
        if first + new <= self.slots:
            # The second copy is read from the first token on that finds no free slot.
            super().write(states, first, position)
            return
        if self._sharing is not None:
            self._stop_sharing()
        data = self._memory()
        if new == 1 and not torch.compiler.is_compiling():
            batch, heads, _, channels = data.shape
            both = data.view(batch, heads, self.copies, self.slots, channels).select(3, first % self.slots)
            both.copy_(states.detach())
            return
        skipped = max(0, new - self.slots)
        kept = states.detach().narrow(TOKENS, skipped, new - skipped)
        slots = (position + torch.arange(skipped, new, device=position.device)) % self.slots
        data.index_copy_(TOKENS, slots, kept)
        data.index_copy_(TOKENS, slots + self.slots, kept)

    def _stop_sharing(self) -> None:
        """Have the memory for itself before tokens are overwritten; a graph can't ask the borrowers, so it moves."""
        if self._is_borrowed or torch.compiler.is_compiling():
            self._own()
        else:
            self.take_back(0)
            self._sharing = None

    def view(self, first: int, count: int) -> torch.Tensor:
        """Return tokens `first` and on, oldest first, as a view; `count` is at most `slots`."""
        return self._memory().narrow(TOKENS, first % self.slots, count)

    def restore(self, tokens: torch.Tensor, first: int = 0) -> None:
        """As `FixedBuffer.restore`, and to the second copy."""
        super().restore(tokens, first)
        self._memory().narrow(TOKENS, self.slots + first, tokens.shape[TOKENS]).copy_(tokens.detach())
