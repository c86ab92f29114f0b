"""Scratch: memory to decode into, used again at every step."""

from __future__ import annotations

import math
from typing import Any

import torch

from kvrack.placement import DEVICE

Place = tuple[str, torch.dtype, torch.device]

WORK = "work."
"""How the slots begin that codecs work in."""

MOST_VIEWS = 4
"""Views of one piece that are kept: those of keys and of values, and as many of an odd layer."""


class Scratch:
    """Memory to decode into, one piece for each slot, dtype and device, used again at every step.

    The layers of a cache share it: attention has read one layer's tokens before the next layer
    decodes its own. A copy of a cache starts with a scratch of its own.
    """

    def __init__(self) -> None:
        self._memory: dict[Place, torch.Tensor] = {}
        # To cut a view costs as much as to decode a few hundred tokens, and layers ask for the same ones.
        self._views: dict[Place, dict[tuple[int, ...], torch.Tensor]] = {}
        self._owned = 0

    def own_slot(self, name: str) -> str:
        """Return a slot that nobody else was given."""
        self._owned += 1
        return f"{name}.{self._owned}"

    def take(
        self,
        slot: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        most: int | None = None,
    ) -> torch.Tensor:
        """Return uninitialised memory of this shape, contiguous; what the slot held before is lost.

        Args:
            slot: which memory to use again.
            shape: of what is returned.
            dtype: of its elements.
            device: where it is.
            most: elements that will ever be asked for, None when unknown: room for later ones isn't made beyond it.
        """
        key = (slot, dtype, device)
        views = self._views.setdefault(key, {})
        if shape in views:
            return views[shape]
        count = math.prod(shape)
        memory = self._memory.get(key)
        if memory is None or memory.shape[0] < count:
            # The old piece goes first: both at once would double the peak.
            views.clear()
            self._memory.pop(key, None)
            roomy = count + count // 4
            capacity = roomy if most is None else max(count, min(roomy, most))
            memory = self._memory[key] = DEVICE.allocate((capacity,), dtype, device)
        if len(views) == MOST_VIEWS:
            del views[next(iter(views))]
        views[shape] = memory[:count].view(shape)
        return views[shape]

    def release(self, slot: str) -> None:
        """Give the memory of a slot back, and all that codecs work in, which holds nothing between calls."""
        kept = [key for key in self._memory if key[0] != slot and not key[0].startswith(WORK)]
        self._memory = {key: self._memory[key] for key in kept}
        self._views = {key: self._views[key] for key in kept}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the memory held, by slot, dtype and device in one name."""
        return {f"{slot}.{dtype}.{device}": memory for (slot, dtype, device), memory in self._memory.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> Scratch:
        return Scratch()
