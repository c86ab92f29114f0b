"""The config of `hqq`; hqq itself isn't imported for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvrack.codec import Role
from kvrack.grouped import GroupedConfig

Bits = Literal[1, 2, 3, 4, 8]
Axis = Literal[0, 1]

OVER_TOKENS: Axis = 0
"""hqq's axis of which each column is a group: within a head, a channel over the tokens of a block."""


class HqqConfig(GroupedConfig):
    """Config of `hqq`."""

    nbits: Bits = Field(default=4, description="bits of a number")
    nbits_key: Bits | None = Field(default=None, description="bits for keys, where they differ from nbits")
    nbits_value: Bits | None = Field(default=None, description="bits for values, where they differ from nbits")
    axis_key: Axis = Field(default=0, description="hqq's axis for keys: 0 groups a channel over tokens, 1 a token")
    axis_value: Axis = Field(default=1, description="hqq's axis for values: 0 groups a channel over tokens, 1 a token")

    def bits(self, role: Role) -> Bits:
        """Return the bits that keys or values are kept in."""
        return (self.nbits_key if role == "keys" else self.nbits_value) or self.nbits

    def is_per_channel(self, role: Role) -> bool:
        """Return whether a group is a channel over tokens."""
        return (self.axis_key if role == "keys" else self.axis_value) == OVER_TOKENS
