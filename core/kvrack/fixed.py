"""Memory of a fixed size and address: FixedBuffer and RingBuffer.

Buffers here do not know how many tokens they hold. The layer does, in one `TokenCount` for both of
its buffers, so that a compiled graph has one number to carry.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

from kvrack import events
from kvrack.buffer import TOKENS, check_states
from kvrack.placement import DEVICE, Placement, keep_address
from kvrack.sharing import Sharing

SelfTokens = TypeVar("SelfTokens", bound="FixedTokens")

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


def constant(states: torch.Tensor) -> torch.Tensor:
    """Return `states` without their gradient history; themselves where they have none, which is quicker to say."""
    return states.detach() if states.requires_grad else states


class FixedTokens(Protocol):
    """What a preallocated layer asks of a buffer of fixed size; `FixedBuffer` says what each method does."""

    @property
    def is_allocated(self) -> bool: ...

    def check(self, states: torch.Tensor, what: str) -> None: ...

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None: ...

    def allocate_for(self, states: torch.Tensor) -> None: ...

    def append(
        self, states: torch.Tensor, seen: int, position: torch.Tensor, first: int, length: int
    ) -> torch.Tensor: ...

    def write(self, states: torch.Tensor, first: int, position: torch.Tensor) -> None: ...

    def read(self, first: int, count: int, seen: int) -> torch.Tensor: ...

    def drop_newest(self, seen: int, left: int) -> None: ...

    def storage(self, first: int, count: int) -> dict[str, torch.Tensor]: ...

    def restore(self, storage: dict[str, torch.Tensor], first: int) -> None: ...

    def memory(self) -> dict[str, torch.Tensor]: ...

    def adopt(self, memory: dict[str, torch.Tensor]) -> None: ...

    def share(self: SelfTokens, other: SelfTokens, held: int) -> None: ...

    def release(self) -> None: ...


class PlainFixedTokens(FixedTokens, Protocol):
    """What `EncodedSlots` asks besides of the buffers it keeps codes in."""

    slots: int
    origin: events.Origin | None

    def view(self, first: int, count: int) -> torch.Tensor: ...

    def put(self, tokens: torch.Tensor, first: int) -> None: ...

    def fill(self, token: torch.Tensor) -> None: ...


class FixedBuffer:
    """Tokens ``[batch, heads, slots, channels]``, token i in slot i, written in place.

    The buffer owns its memory; tensors given to it are copied, detached. Memory is zeroed, since
    attention multiplies slots that a mask hides by zero, which must not meet NaN.

    Args:
        slots: tokens it has room for.
        placement: where the memory lives.

    Attributes:
        data: the memory, None before it is allocated, and always where it isn't a tensor of this
            process's device.
        origin: the layer that it belongs to, which its events name; None where nobody is told.
    """

    copies = 1
    """How often the memory has each slot."""

    def __init__(self, slots: int, placement: Placement = DEVICE) -> None:
        self.slots = slots
        self.placement = placement
        self.data: torch.Tensor | None = None
        self.origin: events.Origin | None = None
        self._sharing: Sharing | None = None
        self._is_borrowed = False

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory."""
        return self.data is not None

    def check(self, states: torch.Tensor, what: str) -> None:
        """Raise ShapeMismatch unless `states` fit the memory there is. `what` names them in the text."""
        check_states(states, self.data, what)

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
        self._let_go()
        shape = (batch, heads, self.copies * self.slots, channels)
        self.data = self.placement.allocate(shape, dtype, device).zero_()
        keep_address(self.data)
        self._tell_grown()

    def _tell_grown(self) -> None:
        """Tell that memory was taken."""
        # Asked in this order, a graph does not depend on who listens.
        if torch.compiler.is_compiling() or not events.listeners or self.origin is None or self.data is None:
            return
        self.origin.tell("grown", self.slots, self.data.nbytes, str(self.data.device))

    def allocate_for(self, states: torch.Tensor) -> None:
        """Make memory for `states` ``[batch, heads, tokens, channels]`` and what is like them."""
        self.allocate(states.shape[0], states.shape[1], states.shape[3], states.dtype, states.device)

    def write(self, states: torch.Tensor, first: int, position: torch.Tensor) -> None:
        """Write `states` as tokens `first` and on; `position` is `first` on the device."""
        if self._is_borrowed:
            self._own()
        data, new = self._data(), states.shape[TOKENS]
        if torch.compiler.is_compiling():
            data.index_copy_(TOKENS, position + torch.arange(new, device=position.device), states.detach())
        else:
            data.narrow(TOKENS, first, new).copy_(constant(states))

    def view(self, first: int, count: int) -> torch.Tensor:
        """Return tokens `first` and on, ``[batch, heads, count, channels]``; slots that hold none, where there are."""
        return self._data().narrow(TOKENS, first, count)

    # --- what a layer asks ----------------------------------------------------------------------

    def append(self, states: torch.Tensor, seen: int, position: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """Write `states` behind the `seen` tokens there are, and return what attention must see.

        Args:
            states: ``[batch, heads, new_tokens, channels]``, as `check` accepts it.
            seen: tokens written so far.
            position: `seen` on the device.
            first: position of the first token to return.
            length: slots to return.

        Returns:
            ``[batch, heads, length, channels]``: a view of the memory where that holds them all.
        """
        after = seen + states.shape[TOKENS]
        # Among several queries the older see tokens that the newer push out, so a ring shows them from outside of it.
        passes_through = after - first > self.slots
        if not passes_through and not carries_gradient(states):
            self.write(states, seen, position)
            return self.view(first, length)
        return beside(self, states, seen, position, first, length)

    def read(self, first: int, count: int, seen: int) -> torch.Tensor:
        """Return tokens `first` and on, of `seen` that were written."""
        return self.view(first, count)

    def drop_newest(self, seen: int, left: int) -> None:
        """Forget all but the first `left` of `seen` tokens; what is past the end is not read, but may be lent."""
        self._take_back(left)

    def storage(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Return `count` tokens from `first` on under the empty name; {} before any allocation."""
        return {} if self.data is None else {"": self.view(first, count)}

    def restore(self, storage: dict[str, torch.Tensor], first: int = 0) -> None:
        """Write what ``storage(first, count)`` returned, to memory that fits it."""
        tokens = storage[""]
        self.release()
        self.allocate_for(tokens)
        self.put(tokens, first)

    def put(self, tokens: torch.Tensor, first: int) -> None:
        """Write `tokens` as ``view(first, count)`` returns them."""
        self.view(first, tokens.shape[TOKENS]).copy_(tokens.detach())

    def fill(self, token: torch.Tensor) -> None:
        """Write `token` ``[batch, heads, 1, channels]`` to every slot, as what an unused one holds."""
        self._data().copy_(token)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return the whole memory under the empty name, to write to: nobody shares it any more. {} before any
        allocation."""
        if self.data is None:
            return {}
        if self._is_borrowed:
            self._own()
        self._take_back(0)
        return {"": self.data}

    def adopt(self, memory: dict[str, torch.Tensor]) -> None:
        """Take what `memory()` of an equal buffer returned for its own."""
        self._let_go()
        self.data = memory[""]

    # --- sharing --------------------------------------------------------------------------------

    def share(self, other: FixedBuffer, held: int) -> None:
        """Show what `other` shows, in its memory: borrowed, and copied before the first write here.

        The memory's owner writes on in place, behind the tokens that it lent, and keeps its address.

        Args:
            other: an equal buffer, the owner or another borrower.
            held: tokens that it holds.
        """
        self._let_go()
        if other.data is None:
            return
        if other._sharing is None:
            other._sharing = Sharing()
        self.data, self._sharing, self._is_borrowed = other.data, other._sharing, True
        self._sharing.join(self, held)

    def release(self) -> None:
        """Forget what is held: memory of its own stays for the next tokens, borrowed memory is given back."""
        self._take_back(0)
        if self._is_borrowed:
            self._let_go()

    def _take_back(self, first: int) -> None:
        """Be ready to write tokens `first` and on anew: who borrowed them gets a copy of the memory."""
        if self._sharing is not None and not self._is_borrowed:
            with Sharing.lock:
                for borrower in self._sharing.others(self, first):
                    borrower._own()

    def _own(self) -> None:
        """Take a copy of the borrowed memory; it happens once, whoever asks first."""
        if torch.compiler.is_compiling():
            self._copy_out()
            return
        with Sharing.lock:
            if self._is_borrowed:
                self._copy_out()

    def _copy_out(self) -> None:
        shared = self._data()
        copied = self.placement.allocate(shared.shape, shared.dtype, shared.device).copy_(shared)
        keep_address(copied)
        self._let_go()
        self.data = copied
        self._tell_grown()

    def _let_go(self) -> None:
        """Give up the memory, which lives on if others borrowed it."""
        if self._sharing is not None and not torch.compiler.is_compiling():
            self._sharing.leave(self)
        self._sharing, self._is_borrowed, self.data = None, False, None

    def _data(self) -> torch.Tensor:
        assert self.data is not None, "used before allocate()"
        return self.data


def carries_gradient(states: torch.Tensor) -> bool:
    """Return whether attention must see `states` themselves, as gradient flows through them."""
    return states.requires_grad and torch.is_grad_enabled()


def beside(
    slots: FixedTokens, states: torch.Tensor, seen: int, position: torch.Tensor, first: int, length: int
) -> torch.Tensor:
    """Write `states` and return what `FixedBuffer.append` does, as a tensor of its own, with `states` as given."""
    past = slots.read(first, seen - first, seen)
    unused = first + length - seen - states.shape[TOKENS]
    pieces = [past, states] if seen > first else [states]
    if unused > 0:
        pieces.append(states.new_zeros((*states.shape[:TOKENS], unused, states.shape[3])))
    everything = torch.cat(pieces, dim=TOKENS) if len(pieces) > 1 else states
    slots.write(states, seen, position)
    return everything


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
        data = self._data()
        if new == 1 and not torch.compiler.is_compiling():
            batch, heads, _, channels = data.shape
            row, head, slot, channel = data.stride()
            # One view for both copies of the slot; data.view(...).select(...) would take two.
            size, stride = (batch, heads, self.copies, channels), (row, head, slot * self.slots, channel)
            data.as_strided(size, stride, data.storage_offset() + slot * (first % self.slots)).copy_(constant(states))
            return
        skipped = max(0, new - self.slots)
        kept = states.detach().narrow(TOKENS, skipped, new - skipped)
        slots = (position + torch.arange(skipped, new, device=position.device)) % self.slots
        data.index_copy_(TOKENS, slots, kept)
        data.index_copy_(TOKENS, slots + self.slots, kept)

    def _stop_sharing(self) -> None:
        """Have the memory for itself before tokens are overwritten; a graph can't ask the borrowers, so it moves."""
        if torch.compiler.is_compiling():
            self._copy_out()
        elif self._is_borrowed:
            self._own()
        else:
            self._take_back(0)
            self._sharing = None

    def view(self, first: int, count: int) -> torch.Tensor:
        """Return tokens `first` and on, oldest first, as a view; `count` is at most `slots`."""
        return self._data().narrow(TOKENS, first % self.slots, count)

    def put(self, tokens: torch.Tensor, first: int) -> None:
        """Write `tokens` to the slots from `first` on, twice."""
        super().put(tokens, first)
        self._data().narrow(TOKENS, self.slots + first, tokens.shape[TOKENS]).copy_(tokens.detach())
