"""The config of `encoder-decoder`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from kvrack import BackendConfig, resolve


class EncoderDecoderConfig(BackendConfig):
    """Config of `encoder-decoder`."""

    self_attention: str = Field(default="dynamic", description="backend of the decoder's own layers")
    self_attention_config: dict[str, Any] = Field(default={}, description="its settings")
    cross_attention: str = Field(default="dynamic", description="backend of what is kept of the encoder's output")
    cross_attention_config: dict[str, Any] = Field(default={}, description="its settings")

    @model_validator(mode="after")
    def _both_resolve(self) -> EncoderDecoderConfig:
        resolve(self.self_attention, self.self_attention_config)
        resolve(self.cross_attention, self.cross_attention_config)
        return self
