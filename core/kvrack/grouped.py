"""GroupedCodec: a few bits for each number, a scale and an offset for each group of them.

What the integer codecs share, whichever library fits the scales and packs the bits: what a group
is, padding, and a decode that makes few passes. Groups lie within one batch row and head. Keys are
grouped per channel over tokens, since a few of their channels are far larger than the rest, values
per token over channels (Liu et al. 2024, "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV
Cache").
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from kvrack.codec import Codec, CodecConfig, Role, pieces

SINKS = {1: 32, 2: 32, 3: 4, 4: 4}
"""First tokens that stay exact by the bits of the others. Four of them take a third of what 4 bits cost in quality away
(KL divergence 0.0057 to 0.0040, SmolLM2 over 2,048 tokens), as Xiao et al. 2023 found for windows."""

TOGETHER = 64

EIGHT_ONES = 0x0101_0101_0101_0101
"""A 1 in each byte of an int64."""


class GroupedConfig(CodecConfig):
    """Base of a grouped codec's config. A subclass says which bits and axes its library has.

    Attributes:
        axis_over_tokens: the library's axis of which a group is a channel over tokens; at any other
            it is a token's channels.
    """

    axis_over_tokens: ClassVar[int]

    nbits: int = Field(description="bits of a number")
    nbits_key: int | None = Field(default=None, description="bits for keys, where they differ from nbits")
    nbits_value: int | None = Field(default=None, description="bits for values, where they differ from nbits")
    axis_key: int = Field(description="the library's axis for keys")
    axis_value: int = Field(description="the library's axis for values")
    q_group_size: int = Field(default=64, ge=1, description="numbers that share a scale and an offset, at most")
    residual_length: int = Field(
        default=128, ge=0, description="newest tokens that are kept exact; a block is encoded once all of it is older"
    )
    sink_tokens: int | None = Field(
        default=None,
        ge=0,
        description=f"first tokens of the sequence that are kept exact; "
        f"when unset, {SINKS[2]} where 2 bits or fewer are used, {SINKS[4]} where 3 or 4 are, else none",
    )

    def bits(self, role: Role) -> int:
        """Return the bits that keys or values are kept in."""
        return (self.nbits_key if role == "keys" else self.nbits_value) or self.nbits

    def is_per_channel(self, role: Role) -> bool:
        """Return whether a group is a channel over tokens."""
        return (self.axis_key if role == "keys" else self.axis_value) == self.axis_over_tokens


@dataclass(frozen=True)
class Packing:
    """How several codes lie in one integer.

    The codes of a group are cut into as many equal parts as there are shifts; part i is found
    `shifts[i]` bits up in each integer.
    """

    shifts: tuple[int, ...]
    bits: int

    def words(self, members: int) -> int:
        """Return how many integers the codes of `members` numbers take."""
        return -(-members // len(self.shifts))


class GroupedCodec(Codec):
    """Codes ``(states - offset) / scale``, rounded and packed; `scale` and `offset` in the states' dtype.

    A subclass fits scales and packs. Per channel, a block is `q_group_size` tokens and each of its
    channels is a group. Per token, its channels are cut into equal groups of at most
    `q_group_size`, padded where they don't divide.

    Args:
        config: the backend's validated config.
        role: whether it is keys or values that this instance encodes.
        packing: how `pack` packs.
    """

    def __init__(self, config: GroupedConfig, role: Role, packing: Packing) -> None:
        super().__init__(config, role)
        self.packing = packing
        # A group is a channel over tokens, or a token's channels.
        self.per_channel = per_channel = config.is_per_channel(role)
        self.levels: int = 2**packing.bits - 1
        self.block_tokens = config.q_group_size if per_channel else 1
        # Fitting takes many small steps, whose cost is the same for one token as for some dozens.
        self.flush_tokens = TOGETHER
        # Half a step, of which `levels` span at most twice the largest magnitude, and what rounding a scale adds.
        self.relative_error = (1 + 2**-6) / self.levels
        self._group_size = config.q_group_size
        # Where members of a group are counted, once states or codes are cut into groups.
        self._axis = 3 if per_channel else 4

    @property
    def sink_tokens(self) -> int:
        assert isinstance(self.config, GroupedConfig)
        if self.config.sink_tokens is not None:
            return self.config.sink_tokens
        return SINKS.get(self.packing.bits, 0)

    @abstractmethod
    def fit(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a scale (0 for a constant group) and an offset for each group.

        Args:
            groups: ``[members, groups]``, float32.

        Returns:
            Both ``[1, groups]``, float32; the offset within half a scale of the smallest member.
        """

    @abstractmethod
    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Return ``[words, groups]`` integers as `packing` says, from uint8 codes ``[words * parts, groups]``."""

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        grouped = self._grouped(states)
        groups = grouped.movedim(self._axis, 0).reshape(grouped.shape[self._axis], -1).float()
        scale, offset = self.fit(groups)
        # What is stored is rounded, and the codes are chosen for what is stored, so that rounding costs no accuracy.
        scale, offset = _round_up(scale, states.dtype), offset.to(states.dtype)
        codes = ((groups - offset.float()) / scale.float()).round_().clamp_(0, self.levels).to(torch.uint8)
        padding = self.packing.words(len(codes)) * len(self.packing.shifts) - len(codes)
        packed = self.pack(torch.nn.functional.pad(codes, (0, 0, 0, padding)))
        shape = [length for axis, length in enumerate(grouped.shape) if axis != self._axis]
        named = {"codes": packed, "scale": scale, "offset": offset}
        return {
            name: tensor.reshape(len(tensor), *shape).movedim(0, self._axis).flatten(self._axis - 1, self._axis)
            for name, tensor in named.items()
        }

    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        named = [self._split(encoded[name], out) for name in ("codes", "scale", "offset")]
        for packed, scale, offset, piece in pieces(*named, out):
            self._decode_piece(packed, scale, offset, piece)

    def _decode_piece(self, packed: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, out: torch.Tensor) -> None:
        """Write the tokens of `out`, given what is theirs as `_split` cuts it."""
        codes = self._unpacked(packed)
        members, channels = self._members(out), out.shape[3]
        groups = codes.shape[4] if self.per_channel else codes.shape[3]
        fits = codes.shape[self._axis] == members and (self.per_channel or groups * members == channels)
        # Half types are slow to compute with on CPUs, and lose what a second rounding costs.
        direct = fits and out.dtype == torch.float32
        work = self._split(out, out) if direct else self.memory("states", codes.shape, torch.float32, out.device)
        work.copy_(codes)
        if self.per_channel:
            torch.addcmul(offset.float(), work, scale.float(), out=work)
        else:
            # With two operands of one number a row, addcmul isn't vectorised.
            work.mul_(scale.float()).add_(offset.float())
        if not direct:
            tokens = work.narrow(self._axis, 0, members).flatten(self._axis - 1, self._axis)
            out.copy_(tokens.narrow(3, 0, channels))

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the codes, one in each integer, cut as `packed` is."""
        shifts = self.packing.shifts
        if len(shifts) == 1:
            return packed
        mask = 2**self.packing.bits - 1
        if torch.compiler.is_compiling():
            return torch.cat([(packed >> shift) & mask for shift in shifts], dim=self._axis)
        shape = list(packed.shape)
        shape[self._axis] *= len(shifts)
        codes = wide = self.memory("codes", shape, packed.dtype, packed.device)
        if _is_eight_wide(packed):
            # Eight at a time, as a CPU has no shift of bytes. What a shift moves into a byte, the mask takes away.
            packed, wide, mask = packed.view(torch.int64), codes.view(torch.int64), mask * EIGHT_ONES
        parts = wide.chunk(len(shifts), dim=self._axis)
        # Each part of a row beside the last is slow to write where it is two integers; part by part, they are many.
        is_apart = wide.dtype == torch.int64 and not self.per_channel and packed.shape[4] == 2
        if is_apart:
            parts = self.memory("parts", (len(shifts), *packed.shape), torch.int64, packed.device).unbind(0)
        for part, shift in zip(parts, shifts, strict=True):
            if shift == 0:
                torch.bitwise_and(packed, mask, out=part)
            else:
                torch.bitwise_right_shift(packed, shift, out=part)
                part.bitwise_and_(mask)
        if is_apart:
            # Sixteen bytes are moved as one number.
            for part, row in zip(parts, codes.view(torch.complex128).unbind(4), strict=True):
                row.copy_(part.view(torch.complex128).squeeze(4))
        return codes

    def _members(self, states: torch.Tensor) -> int:
        """Return how many numbers a group has."""
        if self.per_channel:
            return self.block_tokens
        channels = states.shape[3]
        return -(-channels // -(-channels // self._group_size))

    def _grouped(self, states: torch.Tensor) -> torch.Tensor:
        """Return states with groups cut out in dimension `_axis`: ``[batch, heads, blocks, members, channels]``
        per channel, ``[batch, heads, tokens, groups, members]`` per token."""
        members = self._members(states)
        if self.per_channel:
            return torch.unflatten(states, 2, (-1, members))
        padding = -states.shape[3] % members
        if padding:
            # Repeated, the last channel changes no group's range.
            states = torch.cat([states, states[..., -1:].expand(*states.shape[:3], padding)], dim=3)
        return torch.unflatten(states, 3, (-1, members))

    def _split(self, tensor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return what belongs to `out`, codes, scales or itself, as a view cut like `_grouped`."""
        batch, heads, rows, columns = tensor.shape
        if self.per_channel:
            return tensor.view(batch, heads, out.shape[2] // self.block_tokens, -1, columns)
        channels, members = out.shape[3], self._members(out)
        return tensor.view(batch, heads, rows, -(-channels // members), -1)


def _round_up(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return positive scales in `dtype`, none smaller than it was, so that the codes still span their group."""
    info = torch.finfo(dtype)
    # Float16's steps below its normal numbers count; float32's are zero to many devices.
    least = max(info.smallest_normal * info.eps, torch.finfo(torch.float32).smallest_normal)
    return (scale * (1 + info.eps) + least).clamp_(max=info.max).to(dtype)


def _is_eight_wide(codes: torch.Tensor) -> bool:
    """Return whether bytes can be read as integers of eight."""
    if codes.dtype != torch.uint8 or codes.stride(-1) != 1:
        return False
    starts = (codes.shape[-1], codes.storage_offset(), *codes.stride()[:-1])
    return all(start % 8 == 0 for start in starts)
