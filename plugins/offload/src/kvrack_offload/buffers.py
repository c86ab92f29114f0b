"""HeldBuffer and HeldFixed: kvrack's buffers, their tokens elsewhere."""

from __future__ import annotations

import torch

from kvrack.buffer import TOKENS, check_states
from kvrack.events import Origin
from kvrack.fixed import beside, carries_gradient
from kvrack_offload.prefetch import Station
from kvrack_offload.strip import Form, Strip, form_of


class HeldBuffer:
    """Tokens in order, oldest first, elsewhere; the interface of `kvrack.TokenBuffer`.

    Only new tokens travel out. What `append` and `view` return while the layer is updated lies in
    one of the device's two slots; `view` at any other time returns a copy.

    Args:
        station: of the layer.
        limit: tokens the whole use will need, None when unknown.
        is_whole: make room for them at once, else as they come.
    """

    def __init__(self, station: Station, limit: int | None = None, is_whole: bool = False) -> None:
        self._is_whole = is_whole
        self._station = station
        self._strip = Strip(station)
        self.limit = limit

    @property
    def limit(self) -> int | None:
        """Tokens the whole use will need, None when unknown."""
        return self._strip.limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._strip.limit = limit

    @property
    def origin(self) -> Origin | None:
        """The layer that it belongs to, which its events name."""
        return self._strip.origin

    @origin.setter
    def origin(self, origin: Origin | None) -> None:
        self._strip.origin = origin

    def __len__(self) -> int:
        """Return the number of tokens held."""
        return self._strip.stop - self._strip.start

    def view(self) -> torch.Tensor | None:
        """Return the held tokens ``[batch, heads, tokens, channels]``; None before any allocation."""
        return None if self._strip.form is None else self._strip.read(self._strip.start, len(self))

    def check(self, states: torch.Tensor, what: str) -> None:
        """Raise ShapeMismatch unless `states` can be appended. `what` names them in the text."""
        form = self._strip.form
        check_states(states, None if form is None else form.empty(0), what)

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        """Decide what the first tokens will be, holding none. Nothing happens if that is decided already."""
        if self._strip.form is None:
            self._open(Form(batch, heads, channels, dtype, device))

    def append(self, states: torch.Tensor, keep: int | None = None) -> torch.Tensor:
        """Add tokens and return all that were held, then these, oldest first; see `TokenBuffer.append`."""
        strip, new, held = self._strip, states.shape[TOKENS], len(self)
        if strip.form is None:
            self._open(form_of(states))
        stored = new if keep is None else min(new, keep)
        everything = states
        if held:
            past = strip.read(strip.start, held, room=new)
            if carries_gradient(states) or stored < new:
                everything = torch.cat([past, states], dim=TOKENS)
        strip.write(states.narrow(TOKENS, new - stored, stored), strip.stop)
        if held and everything is states:
            everything = strip.read(strip.start, held + new)
        if keep is not None:
            strip.start = max(strip.start, strip.stop - keep)
        return everything

    def drop_newest(self, count: int) -> None:
        """Forget the newest `count` tokens; all of them when there are fewer."""
        self._strip.stop = max(self._strip.start, self._strip.stop - count)
        self._strip.cut()

    def drop_oldest(self, count: int) -> None:
        """Forget the oldest `count` tokens; all of them when there are fewer."""
        self._strip.start = min(self._strip.stop, self._strip.start + count)

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest `count` tokens."""
        self._strip.start = max(self._strip.start, self._strip.stop - count)

    def clear(self) -> None:
        """Forget every token and give the room back."""
        if not self._station.shapes_only:
            self._strip.shut()

    def storage(self) -> dict[str, torch.Tensor]:
        """Return the held tokens under the empty name; {} before any allocation."""
        view = self.view()
        return {} if view is None else {"": view}

    def metadata(self) -> dict[str, int]:
        """Return nothing: the tokens are the whole state."""
        return {}

    def load(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        """Hold what `storage()` and `metadata()` of another buffer returned, copied."""
        self.restore(storage[""])

    def restore(self, tokens: torch.Tensor) -> None:
        """Hold exactly `tokens`, copied. They are written beside what was held, which stays until all is well."""
        if self._station.shapes_only:
            return
        strip = self._strip
        if strip.form != form_of(tokens):
            self._open(form_of(tokens))
        strip.start = strip.stop
        strip.write(tokens, strip.start)

    def share(self, other: HeldBuffer) -> None:
        """Hold what `other` holds: a copy, since what lies elsewhere belongs to one buffer."""
        held = other.view()
        if held is None:
            self.clear()
        else:
            self.restore(held)

    def _open(self, form: Form) -> None:
        self._strip.open(form, self.limit if self._is_whole else None)


class HeldFixed:
    """Tokens in slots, elsewhere; the interface of `kvrack.fixed.FixedBuffer` and of its ring.

    What `view` returns while the layer is updated lies in one of the device's two slots; at any
    other time it is a copy.

    Args:
        station: of the layer.
        slots: tokens it has room for, of a ring the newest: token i is in slot i modulo `slots`.
    """

    def __init__(self, station: Station, slots: int) -> None:
        self.slots = slots
        self._station = station
        self._strip = Strip(station, slots)

    @property
    def origin(self) -> Origin | None:
        """The layer that it belongs to, which its events name."""
        return self._strip.origin

    @origin.setter
    def origin(self, origin: Origin | None) -> None:
        self._strip.origin = origin

    @property
    def is_allocated(self) -> bool:
        """Whether room was made."""
        return self._strip.form is not None

    def check(self, states: torch.Tensor, what: str) -> None:
        """Raise ShapeMismatch unless `states` fit the room there is. `what` names them in the text."""
        form = self._strip.form
        check_states(states, None if form is None else form.empty(0), what)

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for states of this shape, dtype and device; what is there and fits stays."""
        form = Form(batch, heads, channels, dtype, device)
        if self._strip.form != form and not self._station.shapes_only:
            self._strip.open(form, self.slots)

    def allocate_for(self, states: torch.Tensor) -> None:
        """Make room for `states` ``[batch, heads, tokens, channels]`` and what is like them."""
        self.allocate(states.shape[0], states.shape[1], states.shape[3], states.dtype, states.device)

    def write(self, states: torch.Tensor, first: int, position: torch.Tensor) -> None:
        """Write `states` as tokens `first` and on."""
        self._strip.write(states, first, show=True)

    def view(self, first: int, count: int) -> torch.Tensor:
        """Return tokens `first` and on, ``[batch, heads, count, channels]``; what an unused slot holds for those that
        never were."""
        if self._station.is_active:
            self._strip.shown = (first, count)
        return self._strip.read(first, count)

    def append(self, states: torch.Tensor, seen: int, position: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """Write `states` and return what attention must see; see `FixedBuffer.append`."""
        if seen + states.shape[TOKENS] - first > self.slots or carries_gradient(states):
            return beside(self, states, seen, position, first, length)
        self.write(states, seen, position)
        return self.view(first, length)

    def read(self, first: int, count: int, seen: int) -> torch.Tensor:
        """Return tokens `first` and on."""
        return self.view(first, count)

    def drop_newest(self, seen: int, left: int) -> None:
        """Forget all but the first `left` of `seen` tokens: nothing to do, what is past the end is not read."""

    def storage(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Return `count` tokens from `first` on under the empty name; {} before any allocation."""
        return {"": self.view(first, count)} if self.is_allocated else {}

    def restore(self, storage: dict[str, torch.Tensor], first: int = 0) -> None:
        """Write what ``storage(first, count)`` returned, to room that fits it."""
        self.allocate_for(storage[""])
        self.put(storage[""], first)

    def put(self, tokens: torch.Tensor, first: int) -> None:
        """Write `tokens` as ``view(first, count)`` returns them, to new room: what was held stays until all is well."""
        if self._station.shapes_only:
            return
        self._strip.open(form_of(tokens), self.slots)
        self._strip.write(tokens, first)

    def fill(self, token: torch.Tensor) -> None:
        """Take `token` ``[batch, heads, 1, channels]`` for what an unused slot holds."""
        self._strip.unused = token.detach().clone()

    def share(self, other: HeldFixed, held: int) -> None:
        """Hold what `other` holds: a copy, since what lies elsewhere belongs to one buffer."""
        if other.is_allocated:
            self._strip.unused = other._strip.unused
            self.put(other.view(0, min(held, self.slots)), 0)

    def release(self) -> None:
        """Forget what is held; the room stays for the next tokens."""

    def memory(self) -> dict[str, torch.Tensor]:
        """Return a copy of every slot under the empty name; {} before any allocation."""
        return self.storage(0, self.slots)

    def adopt(self, memory: dict[str, torch.Tensor]) -> None:
        """Write what `memory()` of an equal buffer returned."""
        self.restore(memory)
