"""The codecs of the fake plugin. Int8Codec writes encode and decode and nothing else."""

from typing import Literal

import torch
from pydantic import Field

from kvrack import BackendConfig, Codec, CodecConfig

BLOCK = 32


class Int8Codec(Codec):
    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        # In float32: a scale rounded to bfloat16 lets 127 become 128, which int8 wraps to -128.
        scale = states.abs().amax(-1, keepdim=True).float().clamp_min(1e-30) / 127
        return {"codes": (states / scale).round().to(torch.int8), "scale": scale}

    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        torch.mul(encoded["codes"], encoded["scale"], out=out)


class Int4Config(CodecConfig):
    residual_length: int = Field(default=8, ge=0, description="newest tokens kept exact")


class Int4Codec(Codec):
    """Two 4-bit codes a byte: keys in blocks with a range per channel, values with one per token."""

    relative_error = 0.07

    def __init__(self, config: BackendConfig, role: Literal["keys", "values"]) -> None:
        super().__init__(config, role)
        self.block_tokens = BLOCK if role == "keys" else 1

    def encode(self, states: torch.Tensor) -> dict[str, torch.Tensor]:
        low, high = self._grouped(states).aminmax(dim=3, keepdim=True)
        step = ((high - low) / 15).clamp_min(1e-6)
        codes = ((self._grouped(states) - low) / step).round().clamp(0, 15).to(torch.uint8)
        flat = codes.reshape(states.shape)
        return {
            "codes": flat[..., 0::2] | (flat[..., 1::2] << 4),
            "low": self._row(low, states),
            "step": self._row(step, states),
        }

    def decode(self, encoded: dict[str, torch.Tensor], out: torch.Tensor) -> None:
        codes = torch.stack((encoded["codes"] & 15, encoded["codes"] >> 4), dim=-1).flatten(-2).to(out.dtype)
        if self.role == "keys":
            batch, heads, tokens, channels = codes.shape
            grouped = codes.view(batch, heads, tokens // BLOCK, BLOCK, channels)
            out.copy_((grouped * encoded["step"].unsqueeze(3) + encoded["low"].unsqueeze(3)).view(codes.shape))
        else:
            out.copy_(codes * encoded["step"] + encoded["low"])

    def _grouped(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states with what shares a range in dimension 3."""
        batch, heads, tokens, channels = states.shape
        if self.role == "keys":
            return states.reshape(batch, heads, tokens // BLOCK, BLOCK, channels)
        return states

    def _row(self, ranges: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return one row a block for keys, one a token for values."""
        return ranges.squeeze(3) if self.role == "keys" else ranges
