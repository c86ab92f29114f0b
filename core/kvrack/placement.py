"""Where a buffer's memory lives.

Buffers ask a placement for memory instead of calling torch themselves, so that a backend that
allocates through its build context can be held elsewhere without knowing it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


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


DEVICE = Placement()
