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

FALLS_BY = 0.999
"""A group whose mean error falls by less than a thousandth is done."""

PIECE = 1024
"""Groups that are worked on at a time: some that fit a CPU's cache."""

FEW_GROUPS = 256
"""Groups up to which going on with some costs more than it saves; also, eager and compiled steps are then the same."""

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
        super().__init__(config, role, packing)

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
    # What has no data can't be asked which groups go on, no more than a graph can.
    is_blind = torch.compiler.is_compiling() or groups.is_meta
    if is_blind or groups.shape[1] <= FEW_GROUPS:
        return _optimize_together(groups, inverse, zero, levels, is_blind)
    pieces = zip(*(torch.split(each, PIECE, 1) for each in (groups, inverse, zero)), strict=True)
    return torch.cat([_optimize_piece(own, scales, zeros, levels) for own, scales, zeros in pieces], dim=1)


def _optimize_piece(groups: torch.Tensor, inverse: torch.Tensor, zero: torch.Tensor, levels: int) -> torch.Tensor:
    """As `optimize`, going on with the groups alone whose error still falls."""
    best = zero.clone()
    least = torch.full_like(zero, torch.inf)
    columns = torch.arange(groups.shape[1], device=groups.device)
    for _ in range(ITERATIONS):
        error, following = _step(groups, inverse, zero, levels)
        falling = (error < least * FALLS_BY).squeeze(0).nonzero().squeeze(1)
        if not len(falling):
            break
        columns = columns[falling]
        best[:, columns] = zero[:, falling]
        groups, inverse, least, zero = (each.index_select(1, falling) for each in (groups, inverse, error, following))
    return best


def _optimize_together(
    groups: torch.Tensor, inverse: torch.Tensor, zero: torch.Tensor, levels: int, is_blind: bool
) -> torch.Tensor:
    """As `optimize`, by steps of one shape, which a graph can follow; `is_blind` goes through all of them."""
    best, least = zero, torch.full_like(zero, torch.inf)
    falls = torch.ones_like(zero, dtype=torch.bool)
    for _ in range(ITERATIONS):
        error, following = _step(groups, inverse, zero, levels)
        falls = falls & (error < least * FALLS_BY)
        if not is_blind and not falls.any():
            break
        best, least = torch.where(falls, zero, best), torch.where(falls, error, least)
        zero = following
    return best


def _step(
    groups: torch.Tensor, inverse: torch.Tensor, zero: torch.Tensor, levels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean error of each group with these zero points, and the zero points to try next."""
    restored, _, following, _ = optimize_weights_proximal_legacy_step(
        groups, inverse, zero, [0, levels], BETA, LP_NORM, 0
    )
    return (groups - restored).abs_().mean(dim=0, keepdim=True), following
