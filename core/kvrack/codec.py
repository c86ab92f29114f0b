"""Codec: a block of tokens to code tensors and back. EncodedBuffer: tokens kept so, append-only.

A token is kept exact in a tail until it is old enough and its block is whole; then it is encoded,
once, and its codes never change after. Attention sees the tokens of the current update as they
were given, and older ones decoded into memory that is used again at every step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from pydantic import Field

from kvrack.buffer import TOKENS, TokenBuffer
from kvrack.config import BackendConfig
from kvrack.errors import InvalidPlugin
from kvrack.placement import DEVICE

Role = Literal["keys", "values"]
TAIL = "tail"


class CodecConfig(BackendConfig):
    """Base of a codec's config where some tokens stay exact.

    A codec that encodes each token by itself needs none and may take `BackendConfig` as base.
    """

    residual_length: int = Field(
        default=0, ge=0, description="newest tokens that are kept exact; a block is encoded once all of it is older"
    )


class Codec(ABC):
    """How a block of tokens is encoded. A third party writes `encode` and `decode`.

    A block is `block_tokens` tokens in a row, counted from the first token of the sequence. Each
    block, batch row and head is encoded by itself, which is what keeps batch operations, windows
    and `crop` exact.

    Args:
        config: the backend's validated config.
        role: whether it is keys or values that this instance encodes.
    """

    block_tokens: int = 1
    """Tokens that are encoded together: 1 where each token is, e.g. 32 for a scale per channel."""

    relative_error: float = 1.0
    """Bound on |decoded - given|, relative to the largest magnitude in the same block, batch row and
    head; 0.0 for a codec that loses nothing. The default promises no more than that a value comes
    back no further off than that magnitude."""

    def __init__(self, config: BackendConfig, role: Role) -> None:
        self.config = config
        self.role = role

    @property
    def residual_length(self) -> int:
        """Newest tokens that are kept exact: the config's, 0 where it has no such key."""
        return self.config.residual_length if isinstance(self.config, CodecConfig) else 0

    @abstractmethod
    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the code tensors of one or more whole blocks.

        Args:
            states: ``[batch, heads, blocks * block_tokens, head_dim]``, any float dtype, finite.
                Read only; detached, and no gradient is recorded.

        Returns:
            Tensors by name ("codes", "scale", ...; not "tail"), each ``[batch, heads, blocks * rows,
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


class Scratch:
    """Memory to decode into, one piece for each slot, dtype and device, used again at every step.

    The layers of a cache share it: attention has read one layer's tokens before the next layer
    decodes its own. A copy of a cache starts with a scratch of its own.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._owned = 0

    def own_slot(self, name: str) -> str:
        """Return a slot that nobody else was given."""
        self._owned += 1
        return f"{name}.{self._owned}"

    def take(self, slot: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised memory of this shape, contiguous; what the slot held before is lost."""
        count = 1
        for length in shape:
            count *= length
        key = (slot, dtype, device)
        memory = self._memory.get(key)
        if memory is None or memory.shape[0] < count:
            # The old piece goes first: both at once would double the peak.
            self._memory.pop(key, None)
            memory = self._memory[key] = DEVICE.allocate((count + count // 4,), dtype, device)
        return memory[:count].view(shape)

    def release(self, slot: str) -> None:
        """Give the memory of a slot back."""
        self._memory = {key: memory for key, memory in self._memory.items() if key[0] != slot}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the memory held, by slot, dtype and device in one name."""
        return {f"{slot}.{dtype}.{device}": memory for (slot, dtype, device), memory in self._memory.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Scratch:
        return Scratch()


class EncodedBuffer:
    """Tokens in order, oldest first: whole blocks as codes, then a tail of exact ones.

    It keeps the interface of `TokenBuffer`. `append` returns the new tokens as they were given and
    older ones decoded into `scratch`, valid until the slot's next use.

    Args:
        codec: encodes and decodes.
        new_buffer: returns the buffers for the codes and the tail, given how many rows of the
            buffer one token takes.
        scratch: memory to decode into.
        slot: its slot to use.
        backend: name the codec was asked for by, for messages.
    """

    def __init__(
        self,
        codec: Codec,
        new_buffer: Callable[[float], TokenBuffer],
        scratch: Scratch,
        slot: str,
        backend: str = "",
    ) -> None:
        self.codec = codec
        self._backend = backend
        self._new_buffer = new_buffer
        self._scratch = scratch
        self._slot = slot
        if codec.block_tokens < 1:
            raise self._broken(f"block_tokens is {codec.block_tokens}; expected 1 or more")
        self._block = codec.block_tokens
        self._residual = codec.residual_length
        self._tail = new_buffer(1.0)
        self._codes: dict[str, TokenBuffer] = {}
        self._rows: dict[str, int] = {}
        self._blocks = 0
        # Tokens at the front of the oldest block that have left a window which needs the rest of it.
        self._skip = 0

    def __len__(self) -> int:
        """Return the number of tokens held."""
        return self._blocks * self._block + len(self._tail) - self._skip

    def view(self) -> torch.Tensor | None:
        """Return the held tokens ``[batch, heads, tokens, channels]``, decoded into memory of their own."""
        tail = self._tail.view()
        if tail is None or self._blocks == 0:
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
        everything = self._with_past(states)
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
        whole, part = divmod(self._blocks * self._block - from_codes, self._block)
        if part:
            self._tail.append(self._decoded_block(whole).narrow(TOKENS, 0, part), self._most_tail)
        for name, codes in self._codes.items():
            codes.drop_newest((self._blocks - whole) * self._rows[name])
        self._blocks = whole

    def keep_newest(self, count: int) -> None:
        """Forget all but the newest `count` tokens, and give back memory that only they needed."""
        left, self._skip = divmod(self._skip + max(0, len(self) - count), self._block)
        left_codes = min(left, self._blocks)
        self._blocks -= left_codes
        for name, codes in self._codes.items():
            codes.keep_newest(self._blocks * self._rows[name])
        self._tail.drop_oldest((left - left_codes) * self._block)

    def clear(self) -> None:
        """Forget every token and free the memory."""
        self._tail.clear()
        self._codes, self._rows = {}, {}
        self._blocks = self._skip = 0
        self._scratch.release(self._slot)

    def storage(self) -> dict[str, torch.Tensor]:
        """Return views of the codes by the codec's names, and of the tail; {} before any allocation."""
        tail = self._tail.view()
        if tail is None:
            return {}
        codes = {name: buffer.view() for name, buffer in self._codes.items()}
        return {**{name: view for name, view in codes.items() if view is not None}, TAIL: tail}

    def metadata(self) -> dict[str, int]:
        """Return the integers that, with `storage()`, are the whole state."""
        return {"blocks": self._blocks, "skip": self._skip}

    def load(self, storage: dict[str, torch.Tensor], metadata: dict[str, int]) -> None:
        """Hold what `storage()` and `metadata()` of an equal buffer returned, copied."""
        self._tail.restore(storage[TAIL])
        self._blocks, self._skip = metadata["blocks"], metadata["skip"]
        if self._blocks == 0:
            self._codes, self._rows = {}, {}
            return
        codes = {name: tensor for name, tensor in storage.items() if name != TAIL}
        self._rows = {name: tensor.shape[TOKENS] // self._blocks for name, tensor in codes.items()}
        self._codes = {name: self._codes[name] if name in self._codes else self._code_buffer(name) for name in codes}
        for name, tensor in codes.items():
            self._codes[name].restore(tensor)

    def share(self, other: EncodedBuffer) -> None:
        """Hold what `other` holds, in the same memory; see `TokenBuffer.share`.

        Codes are only ever appended to, so the blocks stay shared until room for further ones is
        wanted by both.
        """
        self._tail.share(other._tail)
        self._rows = dict(other._rows)
        self._codes = {name: self._code_buffer(name) for name in other._codes}
        for name, codes in self._codes.items():
            codes.share(other._codes[name])
        self._blocks, self._skip = other._blocks, other._skip

    # --- taking in ------------------------------------------------------------------------------

    @property
    def _most_tail(self) -> int:
        """Tokens that the tail ever has: those kept exact and a block that isn't whole yet."""
        return self._residual + self._block - 1

    def _take_in(self, states: torch.Tensor, keep: int | None) -> None:
        new, held = states.shape[TOKENS], len(self._tail)
        leaving = 0 if keep is None else max(0, len(self) + new - keep)
        left, skip = divmod(self._skip + leaving, self._block)
        left_codes = min(left, self._blocks)
        left_exact = (left - left_codes) * self._block
        ready = max(0, held + new - left_exact - self._residual) // self._block
        # Encoded before anything is written: a codec that raises changes nothing.
        encoded = self._encode(states, left_exact, ready) if ready else {}
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
            if name == TAIL or not fits or shape[TOKENS] % blocks:
                raise self._broken(
                    f"encode() returned {name!r} of shape {tuple(shape)} for {blocks} blocks of "
                    f"{tuple(source.shape)}; expected [batch, heads, blocks * rows, columns], not named {TAIL!r}"
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

    def _code_buffer(self, name: str) -> TokenBuffer:
        return self._new_buffer(self._rows[name] / self._block)

    # --- giving back ----------------------------------------------------------------------------

    def _with_past(self, states: torch.Tensor) -> torch.Tensor:
        if len(self) == 0:
            return states
        past, new = self._skip + len(self), states.shape[TOKENS]
        if states.requires_grad and torch.is_grad_enabled():
            # Autograd keeps what attention saw until the backward pass, so scratch cannot serve.
            held = self.view()
            assert held is not None
            return torch.cat([held, states], dim=TOKENS)
        batch, heads, _, channels = states.shape
        out = self._scratch.take(self._slot, (batch, heads, past + new, channels), states.dtype, states.device)
        self._decode_into(out)
        out.narrow(TOKENS, past, new).copy_(states)
        return out.narrow(TOKENS, self._skip, past + new - self._skip)

    def _decode_into(self, out: torch.Tensor) -> None:
        """Write every block and the tail to the front of `out`."""
        encoded, exact = self._blocks * self._block, len(self._tail)
        if encoded:
            self._decode(0, self._blocks, out.narrow(TOKENS, 0, encoded))
        tail = self._tail.view()
        if exact and tail is not None:
            out.narrow(TOKENS, encoded, exact).copy_(tail)

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
            encoded[name] = view.narrow(TOKENS, first * self._rows[name], blocks * self._rows[name])
        with torch.no_grad():
            self.codec.decode(encoded, out)

    def _drop_everything(self) -> None:
        self._tail.drop_newest(len(self._tail))
        for codes in self._codes.values():
            codes.drop_newest(len(codes))
        self._blocks = self._skip = 0
