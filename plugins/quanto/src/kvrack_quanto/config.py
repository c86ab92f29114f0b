"""The config of `quanto`; optimum-quanto itself isn't imported for it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvrack.grouped import GroupedConfig

Bits = Literal[2, 4]
Axis = Literal[0, -1]


class QuantoConfig(GroupedConfig):
    """Config of `quanto`."""

    axis_over_tokens: ClassVar[int] = -1
    """quanto's axis that keeps the last dimension apart: a group is a channel over the tokens of a block."""

    nbits: Bits = Field(default=4, description="bits of a number")
    nbits_key: Bits | None = Field(default=None, description="bits for keys, where they differ from nbits")
    nbits_value: Bits | None = Field(default=None, description="bits for values, where they differ from nbits")
    axis_key: Axis = Field(default=-1, description="quanto's axis for keys: -1 groups a channel over tokens, 0 a token")
    axis_value: Axis = Field(
        default=0, description="quanto's axis for values: -1 groups a channel over tokens, 0 a token"
    )
