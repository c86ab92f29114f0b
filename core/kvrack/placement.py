"""Where a buffer's memory lives.

Layers ask their build context for buffers and buffers ask a placement for memory, so that a
backend that does so can be held elsewhere without knowing it: a placement whose memory is not on
the device where the states arrive gives out buffers of its own, which keep the same interface.
That, rather than one buffer class over memory behind an interface, leaves the resident path as
fast as plain tensors are, and lets each kind of buffer move what it must: a buffer that grows in
place on the device has nothing to gain from growing in place in a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvrack.buffer import PlainTokens
    from kvrack.fixed import PlainFixedTokens


class Placement:
    """Memory on the device where the states arrive. The base of other placements."""

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor, owned by the caller.

        It is an ordinary tensor even when asked for under `torch.inference_mode`, since an
        inference tensor could not be written again outside it.
        """
        # Unconditionally: asking whether inference mode is on is what torch.compile cannot trace.
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def buffer(self, growth: float, limit: int | None, is_whole: bool = False) -> PlainTokens:
        """Return a new, empty buffer that grows; see `TokenBuffer` for the arguments."""
        from kvrack.buffer import TokenBuffer

        return TokenBuffer(growth=growth, limit=limit, placement=self, is_whole=is_whole)

    def fixed_buffer(self, slots: int, is_ring: bool) -> PlainFixedTokens:
        """Return a new buffer with room for `slots` tokens, of which a ring keeps the newest; nothing is
        allocated. See `FixedBuffer` and `RingBuffer`."""
        from kvrack.fixed import FixedBuffer, RingBuffer

        return (RingBuffer if is_ring else FixedBuffer)(slots, self)


DEVICE = Placement()


def keep_address(tensor: torch.Tensor) -> None:
    """Tell torch.compile that `tensor` stays where it is, so that CUDA graphs may write to it."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)
