"""The quanto codec: optimum-quanto's types, optimizer and packing, over all groups at once."""

from __future__ import annotations

import logging

import torch
from optimum.quanto import MaxOptimizer, qint2, qint4
from optimum.quanto.tensor.packed import pack_weights

from kvrack.codec import Role
from kvrack.grouped import GroupedCodec, Packing
from kvrack_quanto.config import QuantoConfig

logging.getLogger("kvrack.quanto").info(
    "kvrack-quanto decodes in plain torch; optimum-quanto's C++ extension, which takes a minute to build, isn't needed"
)

TYPES = {2: (qint2, Packing((0, 2, 4, 6), 2)), 4: (qint4, Packing((0, 4), 4))}
"""quanto's types by bits, and where its packing puts the codes, from the lowest bits up."""

GROUPS_LAST = -1
"""quanto's axis that keeps the last dimension apart."""


class QuantoCodec(GroupedCodec):
    """The range from the smallest to the largest number of each group, as quanto's MaxOptimizer takes it."""

    def __init__(self, config: QuantoConfig, role: Role) -> None:
        self._type, packing = TYPES[config.bits(role)]
        self._optimizer = MaxOptimizer()
        super().__init__(config, role, packing)

    def fit(self, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale, shift = self._optimizer.optimize(groups, self._type, GROUPS_LAST)
        return scale, -shift

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        return pack_weights(codes, self._type.bits)  # type: ignore[no-any-return]
