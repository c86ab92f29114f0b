"""TokenBuffer: the only code that moves tokens.

A buffer holds one tensor's worth of tokens, ``[batch, heads, tokens, channels]``, in memory that
has room for more, and answers with a strided view of what it holds. Growing by a factor means that
a token is moved 1 / (growth - 1) times on average, however many there are, where concatenation
moves every token at every step.
"""

from __future__ import annotations

import math
from typing import Protocol, TypeVar

import torch

from kvrack import events
from kvrack.errors import ShapeMismatch
from kvrack.placement import DEVICE, Placement
from kvrack.sharing import Sharing

SelfTokens = TypeVar("SelfTokens", bound="Tokens")

TOKENS = 2
"""The dimension that counts tokens."""

MIN_ROOM = 16
"""Tokens of room that an allocation has at least, so that small buffers do not grow at every step."""


class Tokens(Protocol):
    """What a layer asks of the buffers it keeps tokens in; `TokenBuffer` says what each method does."""

    def __len__(self) -> int: ...

    def view(self) -> torch.Tensor | None: ...

    def check(self, states: torch.Tensor, what: str) -> None: ...

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None: ...

    def append(self, states: torch.Tensor, keep: int | None = None) -> torch.Tensor: ...

    def drop_newest(self, count: int) -> None: ...

    def keep_newest(self, count: int) -> None: ...

    def clear(self) -> None: ...

    def storage(self) -> dict[str, torch.Tensor]: ...

    def metadata(self) -> dict[str, int]: ...

    def load(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None: ...

    def share(self: SelfTokens, other: SelfTokens) -> None: ...


class PlainTokens(Tokens, Protocol):
    """What is asked besides of a buffer that keeps the tensors it is given, as `TokenBuffer` does."""

    limit: int | None
    origin: events.Origin | None

    def drop_oldest(self, count: int) -> None: ...

    def restore(self, tokens: torch.Tensor) -> None: ...


class TokenBuffer:
    """Tokens in order, oldest first, in memory that grows geometrically.

    The buffer owns its memory; tensors given to it are copied, views it returns stay valid until
    its next change. Tokens are written detached: what is held is constant to autograd.

    Args:
        growth: factor by which capacity grows; above 1.
        limit: tokens the whole use will need, None when unknown. Room is never made beyond it
            until it is passed, or until a window is full, which takes room to slide.
        placement: where the memory lives.
        is_whole: allocate for `limit` tokens at once.

    Attributes:
        origin: the layer that it belongs to, which its events name; None where nobody is told.
    """

    def __init__(
        self,
        growth: float = 1.25,
        limit: int | None = None,
        placement: Placement = DEVICE,
        is_whole: bool = False,
    ) -> None:
        if not growth > 1.0:
            raise ValueError(f"TokenBuffer.growth: expected more than 1, got {growth}")
        self.growth = growth
        self.limit = limit
        self.placement = placement
        self.is_whole = is_whole
        self.data: torch.Tensor | None = None
        self.start = 0
        self.stop = 0
        self.origin: events.Origin | None = None
        self._sharing: Sharing | None = None

    def __len__(self) -> int:
        """Return the number of tokens held."""
        return self.stop - self.start

    def view(self) -> torch.Tensor | None:
        """Return the held tokens as a view ``[batch, heads, tokens, channels]``; None before any allocation."""
        if self.data is None:
            return None
        return self.data.narrow(TOKENS, self.start, self.stop - self.start)

    def check(self, states: torch.Tensor, what: str) -> None:
        """Raise ShapeMismatch unless `states` can be appended. `what` names them in the text."""
        check_states(states, self.data, what)

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for the first tokens, holding none. Nothing happens if memory is there already."""
        if self.data is None:
            self._allocate((batch, heads, self._capacity_for(0), channels), dtype, device)

    def append(self, states: torch.Tensor, keep: int | None = None) -> torch.Tensor:
        """Add tokens and return all that were held, then these, oldest first.

        Args:
            states: ``[batch, heads, new_tokens, channels]``, as `check` accepts it.
            keep: tokens that stay held afterwards, the newest; None for all. The returned tensor
                has them all either way. Memory is then bounded by `keep`, not by what passes
                through.

        Returns:
            A view of the buffer, or, where tokens pass through that need not be stored, a tensor
            of its own (`states` itself when nothing was held).
        """
        new = states.shape[TOKENS]
        if keep is not None and len(self) + new > (keep if torch.compiler.is_compiling() else self._most(keep)):
            # Sliding in place needs a graph for steps that slide and one for those that don't, for each
            # combination of layers; a graph that copies the window is one.
            return self._pass_through(states, keep)
        self._reserve(states, new, keep)
        assert self.data is not None
        self.data.narrow(TOKENS, self.stop, new).copy_(states.detach())
        self.stop += new
        everything = self.data.narrow(TOKENS, self.start, self.stop - self.start)
        if keep is not None:
            self.start = max(self.start, self.stop - keep)
        if states.requires_grad and torch.is_grad_enabled():
            # Attention must see the new tokens with their gradient, which the buffer's copy lost.
            past = everything.narrow(TOKENS, 0, everything.shape[TOKENS] - new)
            return torch.cat([past, states], dim=TOKENS)
        return everything

    def drop_newest(self, count: int) -> None:
        """Forget the newest `count` tokens; all of them when there are fewer."""
        self.stop = max(self.start, self.stop - count)

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest `count` tokens, keeping the memory; all of them when there are fewer."""
        self.start = min(self.stop, self.start + count)

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest `count` tokens, and give back memory that only they needed."""
        self.start = max(self.start, self.stop - count)
        if self.data is not None and self.data.shape[TOKENS] > self._most(count):
            self._move_to(self._most(count))

    def clear(self) -> None:
        """Forget every token and free the memory."""
        self._let_go()
        self.start = self.stop = 0

    def share(self, other: TokenBuffer) -> None:
        """Hold what `other` holds, in the same memory for as long as neither writes where the other holds tokens.

        Takes the same time and no memory, however many tokens there are.
        """
        self._let_go()
        if other.data is not None:
            if other._sharing is None:
                other._sharing = Sharing()
                other._sharing.join(other, other.stop)
            self.data, self._sharing = other.data, other._sharing
            self._sharing.join(self, other.stop)
        self.start, self.stop = other.start, other.stop

    def storage(self) -> dict[str, torch.Tensor]:
        """Return the one view there is, under the empty name; {} before any allocation."""
        view = self.view()
        return {} if view is None else {"": view}

    def metadata(self) -> dict[str, int]:
        """Return nothing: the tokens are the whole state."""
        return {}

    def load(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        """Hold what `storage()` and `metadata()` of another buffer returned, copied."""
        self.restore(storage[""])

    def restore(self, tokens: torch.Tensor) -> None:
        """Hold exactly `tokens`, copied; memory that fits them is written in place. What is held already, after
        `share`, is left where it is."""
        length = tokens.shape[TOKENS]
        data = self.data
        if self._sharing is not None and _is_same_view(self.view(), tokens):
            return
        fits = (
            data is not None
            and self._sharing is None
            and data.shape[:TOKENS] == tokens.shape[:TOKENS]
            and data.shape[3] == tokens.shape[3]
            and data.shape[TOKENS] >= length
            and data.dtype == tokens.dtype
            and data.device == tokens.device
        )
        if not fits:
            shape = (tokens.shape[0], tokens.shape[1], self._capacity_for(length), tokens.shape[3])
            self._allocate(shape, tokens.dtype, tokens.device)
        assert self.data is not None
        self.data.narrow(TOKENS, 0, length).copy_(tokens.detach())
        self.start, self.stop = 0, length

    def _most(self, keep: int) -> int:
        """Return the largest capacity that keeping `keep` tokens may take: them and room to slide."""
        return keep + max(MIN_ROOM, math.ceil(keep * (self.growth - 1)))

    def _capacity_for(self, tokens: int) -> int:
        """Return the capacity to allocate for `tokens` tokens and some more."""
        roomy = tokens + max(MIN_ROOM, math.ceil(tokens * (self.growth - 1)))
        if self.limit is None or tokens > self.limit:
            return roomy
        if self.is_whole:
            return self.limit
        return max(tokens, min(roomy, self.limit))

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        owned = self._owned()
        # The old memory goes first: both at once would double the peak.
        self._let_go()
        self.data = self.placement.allocate(shape, dtype, device)
        _mark_growing(self.data)
        self.start = self.stop = 0
        self._tell_grown(owned)

    def _reserve(self, states: torch.Tensor, new: int, keep: int | None) -> None:
        """Make sure that `new` more tokens fit behind the newest."""
        if self.data is None:
            capacity = self._capacity_for(new)
            if keep is not None:
                capacity = min(capacity, self._most(keep))
            self._allocate((states.shape[0], states.shape[1], capacity, states.shape[3]), states.dtype, states.device)
            return
        capacity = self.data.shape[TOKENS]
        # A graph for views of part of the memory doesn't serve a view of all of it, which is contiguous.
        spare = 1 if torch.compiler.is_compiling() else 0
        if self.stop + new + spare <= capacity and (self._sharing is None or self._claims(new)):
            return
        needed = len(self) + new
        if keep is not None and needed > keep:
            # A full window grows no more: with all the room it may have it slides least often.
            self._move_to(self._most(keep))
        elif needed <= capacity and self.start > 0:
            self._move_to(capacity)
        else:
            grown = self._capacity_for(needed)
            self._move_to(grown if keep is None else min(grown, self._most(keep)))

    def _claims(self, new: int) -> bool:
        """Return whether the room for `new` more tokens is this buffer's to write, of the memory it shares."""
        # A graph can't ask for it, so it copies.
        if self._sharing is None or torch.compiler.is_compiling():
            return False
        return self._sharing.claim(self, self.stop, self.stop + new)

    def _let_go(self) -> None:
        """Give up the memory, which lives on if others share it."""
        if self._sharing is not None and not torch.compiler.is_compiling():
            self._sharing.leave(self)
        self._sharing = None
        self.data = None

    def _move_to(self, capacity: int) -> None:
        """Move the held tokens to the front of memory for `capacity` tokens, a new one if it differs or is shared."""
        assert self.data is not None
        held = self.view()
        assert held is not None
        length, owned = len(self), self._owned()
        if self.data.shape[TOKENS] == capacity and self._sharing is None:
            # Source and target may overlap, which copy_ does not allow.
            self.data.narrow(TOKENS, 0, length).copy_(held.clone() if self.start < length else held)
        else:
            shape = (self.data.shape[0], self.data.shape[1], capacity, self.data.shape[3])
            moved = self.placement.allocate(shape, self.data.dtype, self.data.device)
            moved.narrow(TOKENS, 0, length).copy_(held)
            _mark_growing(moved)
            self._let_go()
            self.data = moved
        self.start, self.stop = 0, length
        self._tell_grown(owned)

    def _owned(self) -> int:
        """Return the bytes of memory that it has for itself; 0 in a graph, which tells nothing."""
        if torch.compiler.is_compiling() or self.data is None or self._sharing is not None:
            return 0
        return self.data.nbytes

    def _tell_grown(self, before: int) -> None:
        """Tell that there is more memory than the `before` bytes there were, if so."""
        # Asked in this order, a graph does not depend on who listens.
        if torch.compiler.is_compiling() or not events.listeners or self.origin is None or self.data is None:
            return
        if (nbytes := self._owned()) > before:
            self.origin.tell("grown", self.data.shape[TOKENS], nbytes, str(self.data.device))

    def _pass_through(self, states: torch.Tensor, keep: int) -> torch.Tensor:
        """Return held and new tokens together, storing only the newest `keep` of them."""
        held = self.view()
        everything = states if held is None or len(self) == 0 else torch.cat([held, states], dim=TOKENS)
        newest = everything.narrow(TOKENS, everything.shape[TOKENS] - keep, keep)
        if self.data is None or self.data.shape[TOKENS] < keep or self._sharing is not None:
            shape = (states.shape[0], states.shape[1], self._most(keep), states.shape[3])
            self._allocate(shape, states.dtype, states.device)
        assert self.data is not None
        self.data.narrow(TOKENS, 0, keep).copy_(newest.detach())
        self.start, self.stop = 0, keep
        return everything


def _mark_growing(data: torch.Tensor) -> None:
    """Tell torch.compile that memory of another capacity will follow, so that it needs no new graph for it."""
    if not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(data, TOKENS)


def _is_same_view(held: torch.Tensor | None, tokens: torch.Tensor) -> bool:
    """Return whether `tokens` are the very memory that `held` shows."""
    return (
        held is not None
        and held.shape == tokens.shape
        and held.stride() == tokens.stride()
        and held.dtype == tokens.dtype
        and held.device == tokens.device
        and held.data_ptr() == tokens.data_ptr()
    )


def check_states(states: torch.Tensor, data: torch.Tensor | None, what: str) -> None:
    """Raise ShapeMismatch unless `states` are ``[batch, heads, tokens, channels]`` and fit memory `data`.

    `data` is None before any allocation; `what` names the states in the text.
    """
    if states.dim() != 4:
        raise ShapeMismatch(f"{what}: expected [batch, heads, tokens, head_dim], got {tuple(states.shape)}")
    if data is None:
        return
    given, held = states.shape, data.shape
    if given[0] != held[0] or given[1] != held[1] or given[3] != held[3]:
        remedy = (
            "Call batch_repeat_interleave or batch_select_indices first, or reset()"
            if given[0] != held[0]
            else "Call reset() to start anew"
        )
        raise ShapeMismatch(
            f"{what}: the cache holds batch {held[0]}, {held[1]} heads, head_dim {held[3]}; "
            f"got batch {given[0]}, {given[1]} heads, head_dim {given[3]}. {remedy}"
        )
    if states.dtype != data.dtype or states.device != data.device:
        raise ShapeMismatch(
            f"{what}: the cache holds {data.dtype} on {data.device}, got {states.dtype} on {states.device}. "
            "Call reset() to start anew"
        )
