"""The config of `hqq`; hqq itself isn't imported for it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from kvrack.grouped import GroupedConfig

Bits = Literal[1, 2, 3, 4, 8]
Axis = Literal[0, 1]


class HqqConfig(GroupedConfig):
    """Config of `hqq`."""

    axis_over_tokens: ClassVar[int] = 0
    """hqq's axis of which each column is a group: within a head, a channel over the tokens of a block."""

    nbits: Bits = Field(default=4, description="bits of a number")
    nbits_key: Bits | None = Field(default=None, description="bits for keys, where they differ from nbits")
    nbits_value: Bits | None = Field(default=None, description="bits for values, where they differ from nbits")
    axis_key: Axis = Field(default=0, description="hqq's axis for keys: 0 groups a channel over tokens, 1 a token")
    axis_value: Axis = Field(default=1, description="hqq's axis for values: 0 groups a channel over tokens, 1 a token")
