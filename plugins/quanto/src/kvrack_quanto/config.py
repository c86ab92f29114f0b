"""The config of `quanto`; optimum-quanto itself isn't imported for it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from kvrack.codec import Role
from kvrack.grouped import GroupedConfig

Bits = Literal[2, 4]
Axis = Literal[0, -1]

OVER_TOKENS: Axis = -1
"""quanto's axis that keeps the last dimension, the channels, apart: a group is a channel over the tokens of a block."""


class QuantoConfig(GroupedConfig):
    """Config of `quanto`."""

    nbits: Bits = Field(default=4, description="bits of a number")
    nbits_key: Bits | None = Field(default=None, description="bits for keys, where they differ from nbits")
    nbits_value: Bits | None = Field(default=None, description="bits for values, where they differ from nbits")
    axis_key: Axis = Field(default=-1, description="quanto's axis for keys: -1 groups a channel over tokens, 0 a token")
    axis_value: Axis = Field(
        default=0, description="quanto's axis for values: -1 groups a channel over tokens, 0 a token"
    )

    def bits(self, role: Role) -> Bits:
        """Return the bits that keys or values are kept in."""
        return (self.nbits_key if role == "keys" else self.nbits_value) or self.nbits

    def is_per_channel(self, role: Role) -> bool:
        """Return whether a group is a channel over tokens."""
        return (self.axis_key if role == "keys" else self.axis_value) == OVER_TOKENS
