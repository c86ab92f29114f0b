"""EncodedSlots: tokens as codes in slots of a fixed size and address, for codecs that encode each token by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvrack import events
from kvrack.buffer import TOKENS, check_states
from kvrack.codec import OWN_NAMES, SINKS, TAIL, Codec
from kvrack.errors import InvalidPlugin
from kvrack.fixed import FixedBuffer, PlainFixedTokens, RingBuffer, beside, carries_gradient
from kvrack.placement import DEVICE
from kvrack.scratch import Scratch


class EncodedSlots:
    """Tokens ``[batch, heads, slots, channels]`` as codes, token i in slot i (of a ring: i modulo `slots`).

    Each token is encoded when it arrives; the newest ones and the sinks are kept exact besides,
    and shown so. What an update returns lies in `scratch`, valid until the slot's next use; a
    compiled graph has memory of its own.

    Args:
        codec: encodes and decodes, blocks of one token.
        slots: tokens it has room for.
        new_buffer: returns a buffer of so many slots, for one of the code tensors.
        scratch: memory to decode into.
        slot: the scratch's slot to use.
        backend: name the codec was asked for by, for messages.
        origin: the layer that it belongs to, which its events name; None where nobody is told.
    """

    def __init__(
        self,
        codec: Codec,
        slots: int,
        new_buffer: Callable[[], PlainFixedTokens],
        scratch: Scratch,
        slot: str,
        backend: str = "",
        origin: events.Origin | None = None,
    ) -> None:
        self.codec = codec
        self.slots = slots
        self._scratch = scratch
        self._slot = slot
        self._new_buffer = new_buffer
        self._backend = backend
        self._origin = origin
        self._codes: dict[str, PlainFixedTokens] = {}
        # It keeps the form of the states, so it is there also where no token stays exact.
        self._tail: FixedBuffer
        self._sinks: FixedBuffer
        self._lay_out()

    def _lay_out(self) -> None:
        """Make the buffers for what is kept exact, without memory yet."""
        self._tail = RingBuffer(self.codec.residual_length)
        # One slot more: a graph writes there what is no sink, instead of being made again for it.
        self._sinks = FixedBuffer(self.codec.sink_tokens + 1 if self.codec.sink_tokens else 0)
        self._tail.origin = self._sinks.origin = self._origin

    @property
    def is_allocated(self) -> bool:
        """Whether there is memory."""
        return self._tail.is_allocated

    def check(self, states: torch.Tensor, what: str) -> None:
        """Raise ShapeMismatch unless `states` can be appended. `what` names them in the text."""
        check_states(states, self._tail.data, what)

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make memory for states of this shape, dtype and device; what is there and fits stays.

        Unused slots hold the codes of zeros: a graph decodes them too, which must give numbers.
        """
        if self._tail.fits(batch, heads, channels, dtype, device):
            return
        self._codes = {}
        zeros = torch.zeros((batch, heads, 1, channels), dtype=dtype, device=device)
        for name, code in self._encode(zeros).items():
            buffer = self._codes[name] = self._new_buffer()
            buffer.allocate_for(code)
            buffer.fill(code)
        self._tail.allocate(batch, heads, channels, dtype, device)
        self._sinks.allocate(batch, heads, channels, dtype, device)

    def allocate_for(self, states: torch.Tensor) -> None:
        """Make memory for `states` ``[batch, heads, tokens, channels]`` and what is like them."""
        self.allocate(states.shape[0], states.shape[1], states.shape[3], states.dtype, states.device)

    def append(self, states: torch.Tensor, seen: int, position: torch.Tensor, first: int, length: int) -> torch.Tensor:
        """As `FixedBuffer.append`: `states` come back as given, older tokens decoded where they aren't kept exact."""
        new = states.shape[TOKENS]
        if seen + new - first > self.slots or carries_gradient(states):
            return beside(self, states, seen, position, first, length)
        if torch.compiler.is_compiling():
            out = self._traced(first, length, seen, position)
            behind = torch.arange(new, device=position.device) + (seen - first if first else position)
            out = out.index_copy(TOKENS, behind, states)
        else:
            out = self._take(length)
            self._read_into(out, first, seen - first, seen)
            out.narrow(TOKENS, seen - first, new).copy_(states)
            # What is unused is multiplied by zero, so it must not be a leftover that isn't finite.
            out.narrow(TOKENS, seen - first + new, first + length - seen - new).zero_()
        self.write(states, seen, position)
        return out

    def write(self, states: torch.Tensor, first: int, position: torch.Tensor) -> None:
        """Encode `states` and write them as tokens `first` and on; `position` is `first` on the device."""
        encoded = self._encode(states.detach())
        for name, code in encoded.items():
            self._codes[name].write(code, first, position)
        if self._tail.slots:
            self._tail.write(states, first, position)
        self._write_sinks(states, first, position)
        if not torch.compiler.is_compiling() and events.listeners and self._origin is not None:
            nbytes = sum(code.nbytes for code in encoded.values())
            self._origin.tell("flushed", states.shape[TOKENS], nbytes, str(states.device))

    def read(self, first: int, count: int, seen: int) -> torch.Tensor:
        """Return tokens `first` and on, of `seen` that were written, decoded into memory of their own."""
        like = self._like()
        out = DEVICE.allocate((*like.shape[:TOKENS], count, like.shape[3]), like.dtype, like.device)
        self._read_into(out, first, count, seen)
        return out

    def drop_newest(self, seen: int, left: int) -> None:
        """Forget all but the first `left` of `seen` tokens; those that are now among the newest come from codes."""
        for codes in self._codes.values():
            codes.drop_newest(seen, left)
        start, stop = max(0, left - self._tail.slots), min(left, seen - self._tail.slots)
        if start < stop:
            decoded = self.read(start, stop - start, 0)
            self._tail.write(decoded, start, torch.tensor(start, device=decoded.device))

    def storage(self, first: int, count: int) -> dict[str, torch.Tensor]:
        """Return the codes of `count` tokens from `first` on by the codec's names, and what is kept exact by slot;
        {} before any allocation."""
        tail = self._tail.data
        if tail is None:
            return {}
        named = {name: codes.view(first, count) for name, codes in self._codes.items()}
        named[TAIL] = self._tail.view(0, self._tail.slots) if self._tail.slots else tail
        if self._sinks.slots:
            named[SINKS] = self._sinks.view(0, self._sinks.slots)
        return named

    def restore(self, storage: dict[str, torch.Tensor], first: int) -> None:
        """Write what ``storage(first, count)`` of an equal buffer returned."""
        self.release()
        self.allocate_for(storage[TAIL])
        for name, codes in self._codes.items():
            codes.put(storage[name], first)
        if self._tail.slots:
            self._tail.put(storage[TAIL], 0)
        if self._sinks.slots:
            self._sinks.put(storage[SINKS], 0)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return every piece of memory whole, by name; {} before any allocation."""
        if not self.is_allocated:
            return {}
        pieces = {**self._codes, TAIL: self._tail, SINKS: self._sinks}
        return {name: piece.memory()[""] for name, piece in pieces.items()}

    def adopt(self, memory: dict[str, torch.Tensor]) -> None:
        """Take what `memory()` of an equal buffer returned for its own."""
        self._codes = {name: self._new_buffer() for name in memory if name not in OWN_NAMES}
        for name, piece in {**self._codes, TAIL: self._tail, SINKS: self._sinks}.items():
            piece.adopt({"": memory[name]})

    def share(self, other: EncodedSlots, held: int) -> None:
        """As `FixedBuffer.share`, for the codes; what is kept exact is a few tokens, and copied."""
        self._codes = {name: self._new_buffer() for name in other._codes}
        for name, codes in self._codes.items():
            codes.share(other._codes[name], held)
        for mine, its in ((self._tail, other._tail), (self._sinks, other._sinks)):
            if its.data is not None:
                mine.allocate_for(its.data)
                mine.memory()[""].copy_(its.data)

    def release(self) -> None:
        """As `FixedBuffer.release`."""
        for codes in self._codes.values():
            codes.release()
        if not all(codes.is_allocated for codes in self._codes.values()):
            self._codes = {}
            self._lay_out()

    # --- encoding and decoding ------------------------------------------------------------------

    def _encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            encoded = self.codec.encode(states)
        for name, code in encoded.items():
            if code.dim() != 4 or code.shape[:3] != states.shape[:3] or name in OWN_NAMES:
                raise InvalidPlugin(
                    self._backend or type(self.codec).__qualname__,
                    type(self.codec).__qualname__,
                    f"encode() returned {name!r} of shape {tuple(code.shape)} for {tuple(states.shape)}; with layout "
                    "static expected [batch, heads, tokens, columns], a row for each token",
                )
        return encoded

    def _decode(self, first: int, count: int, out: torch.Tensor) -> None:
        with torch.no_grad():
            self.codec.decode({name: codes.view(first, count) for name, codes in self._codes.items()}, out)

    def _read_into(self, out: torch.Tensor, first: int, count: int, seen: int) -> None:
        """Write tokens `first` and on, of `seen` that were written, to the front of `out`."""
        if not count:
            return
        self._decode(first, count, out.narrow(TOKENS, 0, count))
        sinks = min(self.codec.sink_tokens, first + count) - first
        if sinks > 0:
            out.narrow(TOKENS, 0, sinks).copy_(self._sinks.view(first, sinks))
        start = max(first, seen - self._tail.slots)
        exact = min(first + count, seen) - start
        if self._tail.slots and exact > 0:
            out.narrow(TOKENS, start - first, exact).copy_(self._tail.view(start, exact))

    def _traced(self, first: int, count: int, seen: int, position: torch.Tensor) -> torch.Tensor:
        """Return what `_read_into` writes, by operations whose shapes don't depend on `seen`."""
        like = self._like()
        out = like.new_empty((*like.shape[:TOKENS], count, like.shape[3]))
        where = torch.arange(count, device=position.device)
        if first:
            where = where + (position - (seen - first))
            # By index and not as a view: the view's offset would be one more thing that a graph is made for.
            slots = where % self.slots
            encoded = {
                name: codes.view(0, self.slots).index_select(TOKENS, slots) for name, codes in self._codes.items()
            }
        else:
            encoded = {name: codes.view(0, count) for name, codes in self._codes.items()}
        with torch.no_grad():
            self.codec.decode(encoded, out)
        if self._sinks.slots:
            sinks = self._sinks.view(0, self._sinks.slots).index_select(TOKENS, where.clamp(max=self._sinks.slots - 1))
            out = torch.where((where < self.codec.sink_tokens)[:, None], sinks, out)
        if self._tail.slots:
            tail = self._tail.view(0, self._tail.slots).index_select(TOKENS, where % self._tail.slots)
            is_exact = (where >= position - self._tail.slots) & (where < position)
            out = torch.where(is_exact[:, None], tail, out)
        return out

    def _write_sinks(self, states: torch.Tensor, first: int, position: torch.Tensor) -> None:
        sinks, new = self.codec.sink_tokens, states.shape[TOKENS]
        if not sinks:
            return
        if torch.compiler.is_compiling():
            where = (position + torch.arange(new, device=position.device)).clamp(max=sinks)
            assert self._sinks.data is not None
            self._sinks.data.index_copy_(TOKENS, where, states.detach())
        elif first < sinks:
            fitting = min(new, sinks - first)
            self._sinks.write(states.narrow(TOKENS, 0, fitting), first, position)

    def _like(self) -> torch.Tensor:
        assert self._tail.data is not None, "used before allocate()"
        return self._tail.data

    def _take(self, length: int) -> torch.Tensor:
        like = self._like()
        shape = (*like.shape[:TOKENS], length, like.shape[3])
        # Lengths are few and far apart, so that room for a longer one would rarely do for the next.
        return self._scratch.take(self._slot, shape, like.dtype, like.device, most=0)
