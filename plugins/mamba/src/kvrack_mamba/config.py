"""The config of `mamba`."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from kvrack import BackendConfig, resolve


class MambaConfig(BackendConfig):
    """Config of `mamba`."""

    attention: str = Field(default="dynamic", description="backend of the layers, or parts of layers, that attend")
    attention_config: dict[str, Any] = Field(default={}, description="its settings")
    recorded_states: int = Field(
        default=4,
        ge=0,
        description="recurrent states held for crop once past is recorded, each as it was before a forward; "
        "0 holds none",
    )

    @model_validator(mode="after")
    def _attention_resolves(self) -> MambaConfig:
        resolve(self.attention, self.attention_config)
        return self
