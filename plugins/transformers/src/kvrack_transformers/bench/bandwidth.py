"""Memory bandwidth, measured: what a decode step, which reads weights and cache once, can't beat."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUMBERS = 1 << 26
"""Float32 numbers that are read: 256 MiB, more than any processor's cache."""
COLUMNS = 1 << 12
TIMES = 7


def wait_for(device: torch.device) -> None:
    """Return once the device has done what it was asked for."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_bandwidth(device: torch.device, numbers: int = NUMBERS) -> float:
    """Return the bytes a second that are read on `device`, with torch's threads as they are set.

    The best of some readings of a large matrix, multiplied with a vector as a decode step multiplies its
    weights, and added up.
    """
    import torch

    matrix = torch.ones(numbers // COLUMNS, COLUMNS, device=device)
    vector = torch.ones(COLUMNS, device=device)
    best = float("inf")
    for _ in range(TIMES):
        for is_product in (True, False):
            wait_for(device)
            start = time.perf_counter()
            torch.mv(matrix, vector) if is_product else matrix.sum()
            wait_for(device)
            best = min(best, time.perf_counter() - start)
    return matrix.nbytes / best
