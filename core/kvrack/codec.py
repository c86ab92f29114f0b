"""Codec: a block of tokens to code tensors and back. EncodedBuffer: tokens kept so, append-only.

A token is kept exact in a tail until it is old enough and its block is whole; then it is encoded,
once, and its codes never change after. Attention sees the tokens of the current update as they
were given, and older ones decoded into memory that is used again at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from pydantic import Field

from kvrack import events
from kvrack.buffer import TOKENS, PlainTokens
from kvrack.config import BackendConfig, LayoutConfig
from kvrack.errors import InvalidPlugin
from kvrack.placement import DEVICE
from kvrack.scratch import WORK, Scratch

Role = Literal["keys", "values"]
TAIL = "tail"
SINKS = "sinks"
FEW = 8
"""Tokens come a few at a time where an update brings fewer than a codec's `flush_tokens` by this factor."""

PIECE = 2**20
"""Numbers that are decoded at a time, which bounds the memory that takes besides the result's."""

OWN_NAMES = (TAIL, SINKS)
"""What an EncodedBuffer names itself in `storage()`, so that a codec may not."""


def pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield views of all tensors, piece by piece in order, as a codec decodes them.

    Args:
        *tensors: ``[batch, heads, rows, ...]``, cut alike along their rows, of which each has a multiple of the
            first one's; of the last one, which is decoded into, a piece has at most `PIECE` numbers or what one row
            of the first stands for.
    """
    numbers = tensors[-1].numel()
    if torch.compiler.is_compiling() or numbers <= PIECE:
        # A graph isn't made anew for another number of pieces.
        yield tensors
        return
    rows = tensors[0].shape[TOKENS]
    step = max(1, PIECE * rows // numbers)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        each = ((tensor, tensor.shape[TOKENS] // rows) for tensor in tensors)
        yield tuple(tensor.narrow(TOKENS, first * times, count * times) for tensor, times in each)


class CodecConfig(LayoutConfig):
    """Base of a codec's config where some tokens stay exact.

    A codec that encodes each token by itself needs none and may take `LayoutConfig` as base.
    """

    residual_length: int = Field(
        default=0, ge=0, description="newest tokens that are kept exact; a block is encoded once all of it is older"
    )
    sink_tokens: int | None = Field(
        default=0, ge=0, description="first tokens of the sequence that are kept exact, as attention leans on them most"
    )


class Codec(ABC):
    """How a block of tokens is encoded. A third party writes `encode` and `decode`.

    A block is `block_tokens` tokens in a row, counted from the first token after the sinks. Each
    block, batch row and head is encoded by itself, which is what keeps batch operations, windows
    and `crop` exact.

    Args:
        config: the backend's validated config.
        role: whether it is keys or values that this instance encodes.

    Attributes:
        scratch: what `memory` takes from; of a layer's codec, the cache's, so that it is counted and shared.
    """

    block_tokens: int = 1
    """Tokens that are encoded together: 1 where each token is, e.g. 32 for a scale per channel."""

    flush_tokens: int = 1
    """Tokens that are encoded at a time where most of the cost is by call: those that come a few at a time
    wait in the tail, exact, until there are as many."""

    relative_error: float = 1.0
    """Bound on |decoded - given|, relative to the largest magnitude in the same block, batch row and
    head; 0.0 for a codec that loses nothing. The default promises no more than that a value comes
    back no further off than that magnitude."""

    compiles: bool = True
    """Whether `encode` and `decode` trace under torch.compile; asked with layout static and blocks of one token."""

    def __init__(self, config: BackendConfig, role: Role) -> None:
        self.config = config
        self.role = role
        self.scratch = Scratch()

    @property
    def residual_length(self) -> int:
        """Newest tokens that are kept exact: the config's, 0 where it has no such key."""
        return self.config.residual_length if isinstance(self.config, CodecConfig) else 0

    @property
    def sink_tokens(self) -> int:
        """First tokens of the sequence kept exact: the config's, 0 where it has no such key or leaves it open.

        Attention puts much weight on them whatever they are, which makes their error count most
        (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks").
        """
        return (self.config.sink_tokens or 0) if isinstance(self.config, CodecConfig) else 0

    @abstractmethod
    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the code tensors of one or more whole blocks.

        Args:
            states: ``[batch, heads, blocks * block_tokens, head_dim]``, any float dtype, finite.
                Read only; detached, and no gradient is recorded.

        Returns:
            Tensors by name ("codes", "scale", ...; not "tail" or "sinks"), each ``[batch, heads, blocks * rows,
            columns]`` with rows in the order of blocks; rows and columns are the same at every
            call, and may differ by name.
        """

    @abstractmethod
    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        """Write the tokens of `encoded` into `out`, in its dtype.

        Args:
            encoded: what `encode` returned for as many blocks, possibly as strided views. Read only.
            out: ``[batch, heads, blocks * block_tokens, head_dim]``, uninitialised, possibly strided.
        """

    def memory(self, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory to work in, contiguous, used again by whoever next asks for `name`.

        Large tensors made anew at each call cost more than what is computed in them.
        """
        if torch.compiler.is_compiling():
            return torch.empty(tuple(shape), dtype=dtype, device=device)
        return self.scratch.take(WORK + name, tuple(shape), dtype, device)


class EncodedBuffer:
    """Tokens in order, oldest first: exact sinks, whole blocks as codes, then a tail of exact ones.

    Sinks are the first tokens of the sequence. A window lets go of them as of any other token.

    It keeps the interface of `TokenBuffer`. `append` returns the new tokens as they were given and
    older ones decoded into `scratch`, valid until the slot's next use.

    Args:
        codec: encodes and decodes.
        new_buffer: returns the buffers for the codes and the tail, given how many rows of the
            buffer one token takes.
        scratch: memory to decode into.
        slot: its slot to use.
        backend: name the codec was asked for by, for messages.
        limit: tokens the whole use will need, None when unknown; `scratch` gets no room beyond it until it is passed.
        origin: the layer that it belongs to, which its events name; None where nobody is told.
    """

    def __init__(
        self,
        codec: Codec,
        new_buffer: Callable[[float], PlainTokens],
        scratch: Scratch,
        slot: str,
        backend: str = "",
        limit: int | None = None,
        origin: events.Origin | None = None,
    ) -> None:
        self.codec = codec
        self._backend = backend
        self._origin = origin
        self._new_buffer = new_buffer
        self._scratch = scratch
        self._slot = slot
        self._limit = limit
        if codec.block_tokens < 1:
            raise self._broken(f"block_tokens is {codec.block_tokens}; expected 1 or more")
        self._block = codec.block_tokens
        self._residual = codec.residual_length
        # Blocks that are encoded at a time, at least.
        self._flush = max(1, codec.flush_tokens // codec.block_tokens)
        self._sinks = new_buffer(1.0)
        self._sinks.limit = codec.sink_tokens
        # Tokens that are still to come before the sinks are complete; no other token is held before.
        self._to_sink = codec.sink_tokens
        self._tail = new_buffer(1.0)
        self._tail.limit = self._most_tail
        self._codes: dict[str, PlainTokens] = {}
        self._rows: dict[str, int] = {}
        self._blocks = 0
        # Tokens at the front of the oldest block that have left a window which needs the rest of it.
        self._skip = 0

    def __len__(self) -> int:
        """Return the number of tokens held."""
        return len(self._sinks) + self._blocks * self._block + len(self._tail) - self._skip

    def view(self) -> torch.Tensor | None:
        """Return the held tokens ``[batch, heads, tokens, channels]``, decoded into memory of their own."""
        tail = self._tail.view()
        if tail is None or (self._blocks == 0 and len(self._sinks) == 0):
            return tail if tail is None else tail.narrow(TOKENS, self._skip, len(self))
        batch, heads, _, channels = tail.shape
        out = DEVICE.allocate((batch, heads, self._skip + len(self), channels), tail.dtype, tail.device)
        self._decode_into(out)
        return out.narrow(TOKENS, self._skip, len(self))

    def check(self, states: torch.Tensor, what: str) -> None:
        """Raise ShapeMismatch unless `states` can be appended. `what` names them in the text."""
        self._tail.check(states, what)

    def allocate(self, batch: int, heads: int, channels: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room for the first tokens, holding none. Nothing happens if memory is there already."""
        self._tail.allocate(batch, heads, channels, dtype, device)
        if self._to_sink:
            self._sinks.allocate(batch, heads, channels, dtype, device)

    def append(self, states: torch.Tensor, keep: int | None = None) -> torch.Tensor:
        """Add tokens and return all that were held, then these, oldest first.

        Args:
            states: ``[batch, heads, new_tokens, channels]``, as `check` accepts it.
            keep: tokens that stay held afterwards, the newest; None for all. The returned tensor
                has them all either way.

        Returns:
            A view of the scratch; `states` itself when nothing was held; a tensor of its own where
            `states` carry a gradient.
        """
        everything = self._with_past(states, keep)
        self._take_in(states.detach(), keep)
        return everything

    def drop_newest(self, count: int) -> None:
        """Forget the newest `count` tokens; all of them when there are fewer.

        A block that is cut is decoded, once, and what is left of it goes to the tail.
        """
        if count >= len(self):
            self._drop_everything()
            return
        from_codes = count - len(self._tail)
        self._tail.drop_newest(count)
        if from_codes <= 0:
            return
        from_sinks = from_codes - self._blocks * self._block
        if from_sinks > 0:
            self._sinks.drop_newest(from_sinks)
            self._to_sink += from_sinks
            from_codes -= from_sinks
        whole, part = divmod(self._blocks * self._block - from_codes, self._block)
        if part:
            self._tail.append(self._decoded_block(whole).narrow(TOKENS, 0, part), self._most_tail)
        for name, codes in self._codes.items():
            codes.drop_newest((self._blocks - whole) * self._rows[name])
        self._blocks = whole

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest `count` tokens, and give back memory that only they needed."""
        leaving = max(0, len(self) - count)
        from_sinks = min(leaving, len(self._sinks))
        self._drop_sinks(from_sinks)
        left, self._skip = divmod(self._skip + leaving - from_sinks, self._block)
        left_codes = min(left, self._blocks)
        self._blocks -= left_codes
        for name, codes in self._codes.items():
            codes.keep_newest(self._blocks * self._rows[name])
        self._tail.drop_oldest((left - left_codes) * self._block)

    def clear(self) -> None:
        """Forget every token and free the memory."""
        self._tail.clear()
        self._sinks.clear()
        self._to_sink = self.codec.sink_tokens
        self._codes, self._rows = {}, {}
        self._blocks = self._skip = 0
        self._scratch.release(self._slot)

    def storage(self) -> dict[str, torch.Tensor]:
        """Return views of the codes by the codec's names, of the tail, and of the sinks if any; {} before any
        allocation."""
        tail, sinks = self._tail.view(), self._sinks.view()
        if tail is None:
            return {}
        codes = {name: buffer.view() for name, buffer in self._codes.items()}
        named = {**{name: view for name, view in codes.items() if view is not None}, TAIL: tail}
        return named if sinks is None else {**named, SINKS: sinks}

    def metadata(self) -> dict[str, int]:
        """Return the integers that, with `storage()`, are the whole state."""
        rows = {f"rows.{name}": rows for name, rows in self._rows.items()}
        return {"blocks": self._blocks, "skip": self._skip, "to_sink": self._to_sink, **rows}

    def load(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        """Hold what `storage()` and `metadata()` of an equal buffer returned, copied."""
        self._tail.restore(storage[TAIL])
        if SINKS in storage:
            self._sinks.restore(storage[SINKS])
        else:
            self._sinks.clear()
        self._blocks, self._skip, self._to_sink = metadata["blocks"], metadata["skip"], metadata["to_sink"]
        codes = {name: tensor for name, tensor in storage.items() if name not in OWN_NAMES}
        # Not to be read off the tensors: a window may have left no block of them.
        self._rows = {name: metadata[f"rows.{name}"] for name in codes}
        self._codes = {name: self._codes[name] if name in self._codes else self._code_buffer(name) for name in codes}
        for name, tensor in codes.items():
            self._codes[name].restore(tensor)

    def share(self, other: EncodedBuffer) -> None:
        """Hold what `other` holds, in the same memory; see `TokenBuffer.share`.

        Codes are only ever appended to, so the blocks stay shared until room for further ones is
        wanted by both.
        """
        self._tail.share(other._tail)
        self._sinks.share(other._sinks)
        self._rows = dict(other._rows)
        self._codes = {name: self._code_buffer(name) for name in other._codes}
        for name, codes in self._codes.items():
            codes.share(other._codes[name])
        self._blocks, self._skip, self._to_sink = other._blocks, other._skip, other._to_sink

    # --- taking in ------------------------------------------------------------------------------

    @property
    def _most_tail(self) -> int:
        """Tokens that the tail ever has: those kept exact and blocks that aren't whole yet."""
        return self._residual + self._flush * self._block - 1

    def _take_in(self, states: torch.Tensor, keep: int | None) -> None:
        leaving = 0 if keep is None else max(0, len(self) + states.shape[TOKENS] - keep)
        sinking = min(states.shape[TOKENS], self._to_sink)
        if sinking:
            sinks = states.narrow(TOKENS, 0, sinking)
            states = states.narrow(TOKENS, sinking, states.shape[TOKENS] - sinking)
        from_sinks = min(leaving, len(self._sinks) + sinking)
        new, held = states.shape[TOKENS], len(self._tail)
        left, skip = divmod(self._skip + leaving - from_sinks, self._block)
        left_codes = min(left, self._blocks)
        left_exact = (left - left_codes) * self._block
        ready = max(0, held + new - left_exact - self._residual) // self._block
        if ready < self._flush and new * FEW < self._flush * self._block:
            ready = 0
        # Encoded before anything is written: a codec that raises changes nothing.
        encoded = self._encode(states, left_exact, ready) if ready else {}
        if sinking:
            self._sinks.append(sinks)
            self._to_sink -= sinking
        self._drop_sinks(from_sinks)
        for name, codes in self._codes.items():
            codes.drop_oldest(left_codes * self._rows[name])
        for name, tensor in encoded.items():
            most = None if keep is None else -(-(keep + self._block - 1) // self._block) * self._rows[name]
            self._codes[name].append(tensor, most)
        moved = left_exact + ready * self._block
        self._tail.drop_oldest(moved)
        stored = states if moved <= held else states.narrow(TOKENS, moved - held, held + new - moved)
        self._tail.append(stored, self._most_tail)
        self._blocks += ready - left_codes
        self._skip = skip
        if encoded and not torch.compiler.is_compiling() and events.listeners and self._origin is not None:
            nbytes = sum(code.nbytes for code in encoded.values())
            self._origin.tell("flushed", ready * self._block, nbytes, str(states.device))

    def _drop_sinks(self, count: int) -> None:
        """Forget the oldest `count` sinks, as a window leaves them behind; once they are gone, their memory too."""
        self._sinks.drop_oldest(count)
        if count and not self._to_sink and not len(self._sinks):
            self._sinks.clear()

    def _encode(self, states: torch.Tensor, start: int, blocks: int) -> dict[str, torch.Tensor]:
        """Return the codes of `blocks` blocks of tail and states together, from token `start` on."""
        held, stop = len(self._tail), start + blocks * self._block
        pieces = []
        if start < held:
            tail = self._tail.view()
            assert tail is not None
            pieces.append(tail.narrow(TOKENS, start, min(stop, held) - start))
        if stop > held:
            first = max(0, start - held)
            pieces.append(states.narrow(TOKENS, first, stop - held - first))
        source = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=TOKENS)
        with torch.no_grad():
            encoded = self.codec.encode(source)
        self._accept(encoded, source, blocks)
        return encoded

    def _accept(self, encoded: dict[str, torch.Tensor], source: torch.Tensor, blocks: int) -> None:
        """Check what a codec returned, and make the buffers for it the first time."""
        for name, tensor in encoded.items():
            shape = tensor.shape
            fits = len(shape) == 4 and shape[:TOKENS] == source.shape[:TOKENS] and shape[TOKENS] >= blocks
            if name in OWN_NAMES or not fits or shape[TOKENS] % blocks:
                raise self._broken(
                    f"encode() returned {name!r} of shape {tuple(shape)} for {blocks} blocks of "
                    f"{tuple(source.shape)}; expected [batch, heads, blocks * rows, columns], "
                    f"not named {TAIL!r} or {SINKS!r}"
                )
        rows_by_name = {name: tensor.shape[TOKENS] // blocks for name, tensor in encoded.items()}
        if not self._codes:
            self._rows = rows_by_name
            self._codes = {name: self._code_buffer(name) for name in encoded}
        if rows_by_name != self._rows or not encoded:
            raise self._broken(f"encode() returned rows per block {rows_by_name}; before, they were {self._rows}")
        for name, tensor in encoded.items():
            self._codes[name].check(tensor, f"{type(self.codec).__name__}.encode()[{name!r}]")

    def _broken(self, reason: str) -> InvalidPlugin:
        name = type(self.codec).__qualname__
        return InvalidPlugin(self._backend or name, name, reason)

    def _code_buffer(self, name: str) -> PlainTokens:
        return self._new_buffer(self._rows[name] / self._block)

    # --- giving back ----------------------------------------------------------------------------

    def _with_past(self, states: torch.Tensor, keep: int | None) -> torch.Tensor:
        if len(self) == 0:
            return states
        past, new = self._skip + len(self), states.shape[TOKENS]
        if states.requires_grad and torch.is_grad_enabled():
            # Autograd keeps what attention saw until the backward pass, so scratch cannot serve.
            held = self.view()
            assert held is not None
            return torch.cat([held, states], dim=TOKENS)
        batch, heads, _, channels = states.shape
        most = self._most_shown(past, new, keep)
        out = self._scratch.take(
            self._slot,
            (batch, heads, past + new, channels),
            states.dtype,
            states.device,
            None if most is None else batch * heads * most * channels,
        )
        self._decode_into(out)
        out.narrow(TOKENS, past, new).copy_(states)
        return out.narrow(TOKENS, self._skip, past + new - self._skip) if self._skip else out

    def _most_shown(self, past: int, new: int, keep: int | None) -> int | None:
        """Return how many tokens updates like this one will ever decode and add, None when unknown."""
        most = None if self._limit is None or past + new > self._limit else self._limit
        if keep is None:
            return most
        # Of the oldest block the window may need a single token.
        windowed = keep + self._block - 1 + new
        return windowed if most is None else min(most, windowed)

    def _decode_into(self, out: torch.Tensor) -> None:
        """Write the sinks, every block and the tail to the front of `out`."""
        sunk, encoded, exact = len(self._sinks), self._blocks * self._block, len(self._tail)
        if sunk:
            _copy_tokens(self._sinks, out, 0)
        if encoded:
            self._decode(0, self._blocks, out.narrow(TOKENS, sunk, encoded))
        if exact:
            _copy_tokens(self._tail, out, sunk + encoded)

    def _decoded_block(self, index: int) -> torch.Tensor:
        tail = self._tail.view()
        assert tail is not None
        out = DEVICE.allocate((*tail.shape[:TOKENS], self._block, tail.shape[3]), tail.dtype, tail.device)
        self._decode(index, 1, out)
        return out

    def _decode(self, first: int, blocks: int, out: torch.Tensor) -> None:
        encoded = {}
        for name, codes in self._codes.items():
            view = codes.view()
            assert view is not None
            rows = self._rows[name]
            encoded[name] = view if blocks == self._blocks else view.narrow(TOKENS, first * rows, blocks * rows)
        with torch.no_grad():
            self.codec.decode(encoded, out)

    def _drop_everything(self) -> None:
        self._sinks.drop_newest(len(self._sinks))
        self._to_sink = self.codec.sink_tokens
        self._tail.drop_newest(len(self._tail))
        for codes in self._codes.values():
            codes.drop_newest(len(codes))
        self._blocks = self._skip = 0


def _copy_tokens(buffer: PlainTokens, out: torch.Tensor, first: int) -> None:
    """Write what `buffer` holds as tokens `first` and on of `out`."""
    held = buffer.view()
    assert held is not None
    out.narrow(TOKENS, first, held.shape[TOKENS]).copy_(held)
