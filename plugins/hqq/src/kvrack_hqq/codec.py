"""The hqq codec: hqq's half-quadratic optimizer and packing, over all groups at once and for each by itself."""

from __future__ import annotations

import torch
from hqq.core.bitpack import BitPack
from hqq.core.optimize import optimize_weights_proximal_legacy_step

from kvrack.codec import Role
from kvrack.grouped import GroupedCodec, Packing
from kvrack_hqq.config import HqqConfig

ITERATIONS = 20
LP_NORM = 0.7
BETA = 10.0
"""hqq's own defaults (Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models")."""

PACKINGS = {
    1: (Packing((7, 6, 5, 4, 3, 2, 1, 0), 1), BitPack.pack_1bit_u8),
    2: (Packing((6, 4, 2, 0), 2), BitPack.pack_2bit_u8),
    3: (Packing((27, 24, 21, 18, 15, 12, 9, 6, 3, 0), 3), BitPack.pack_3bit_32),
    4: (Packing((4, 0), 4), BitPack.pack_4bit_u8),
    8: (Packing((0,), 8), BitPack.pack_8bit_u8),
}
"""hqq's packings by bits: where it puts the codes, and the function that does. It packs along the first dimension."""


class HqqCodec(GroupedCodec):
    """Zero points fitted by hqq, of the range from the smallest to the largest number of each group.

    hqq stops for all of a tensor when its mean error no longer falls; here each group stops by
    itself, so that it comes out the same whatever else is in the batch.
    """

    def __init__(self, config: HqqConfig, role: Role) -> None:
        packing, self._pack = PACKINGS[config.bits(role)]
        super().__init__(config, role, packing, config.is_per_channel(role))

    def fit(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = groups.aminmax(dim=0, keepdim=True)
        scale = high / self.levels - low / self.levels
        # hqq's scale is how many codes a unit takes. Where it overflows, the group is constant or next to it.
        inverse = scale.reciprocal()
        varies = inverse.isfinite()
        inverse = torch.where(varies, inverse, 1.0)
        first = -low * inverse
        zero = optimize(groups, inverse, first, self.levels)
        # No further off than rounding is, so that the error of no single number grows by fitting the mean.
        zero = zero.clamp(first - 0.5, first + 0.5)
        return scale, torch.where(varies, -zero * scale, low)

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        return self._pack(codes)  # type: ignore[no-any-return]


def optimize(groups: torch.Tensor, inverse: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    """Return hqq's zero point ``[1, groups]`` for each column of `groups`.

    Args:
        groups: ``[members, groups]``, float32.
        inverse: codes that a unit takes, ``[1, groups]``.
        zero: code of 0.0 to begin with, ``[1, groups]``.
        levels: the largest code.
    """
    best, least = zero, torch.full_like(zero, torch.inf)
    falls = torch.ones_like(zero, dtype=torch.bool)
    for _ in range(ITERATIONS):
        restored, _, following, _ = optimize_weights_proximal_legacy_step(
            groups, inverse, zero, [0, levels], BETA, LP_NORM, 0
        )
        error = (groups - restored).abs_().mean(dim=0, keepdim=True)
        falls = falls & (error < least)
        best, least = torch.where(falls, zero, best), torch.where(falls, error, least)
        # A graph can't ask, nor can what has no data; both go through all of them.
        if not torch.compiler.is_compiling() and not falls.is_meta and not falls.any():
            break
        zero = torch.where(falls, following, zero)
    return best
