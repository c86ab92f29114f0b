"""Good codecs with layout static: one that encodes each token, with exact ones at both ends, and one of blocks."""

from __future__ import annotations

from typing import Literal

import torch

from kvrack.codec import Codec, CodecConfig


class StaticCodecConfig(CodecConfig):
    """Config of the codecs here: preallocated, some tokens exact at both ends."""

    layout: Literal["dynamic", "static"] = "static"
    residual_length: int = 5
    sink_tokens: int | None = 3


class TokenCodec(Codec):
    """8-bit integers, a scale for each token and head."""

    block_tokens = 1
    relative_error = 0.006

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = states.float().abs().amax(-1, keepdim=True).clamp_min(1e-37) / 127
        return {"codes": (states.float() / scale).round().clamp(-127, 127).to(torch.int8), "scale": scale}

    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(encoded["codes"] * encoded["scale"])


class BlockCodec(Codec):
    """8-bit integers, a scale for each channel over four tokens; kept in buffers that are allocated whole."""

    block_tokens = 4
    relative_error = 0.006

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        grouped = states.float().unflatten(2, (-1, self.block_tokens))
        scale = grouped.abs().amax(3, keepdim=True).clamp_min(1e-37) / 127
        codes = (grouped / scale).round().clamp(-127, 127).to(torch.int8)
        return {"codes": codes.flatten(2, 3), "scale": scale.flatten(2, 3)}

    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        grouped = encoded["codes"].unflatten(2, (-1, self.block_tokens)) * encoded["scale"].unsqueeze(3)
        out.copy_(grouped.flatten(2, 3))
