"""The configs of `offload`, `offloaded` and `offloaded_static`."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from kvrack import BackendConfig


class PlaceConfig(BackendConfig):
    """Where layers are held, and which of them: the keys that the three names have in common."""

    tier: Literal["host", "disk"] = Field(
        default="host", description="host: pinned memory beside an accelerator, nothing without one; disk: a file"
    )
    folder: Path | None = Field(
        default=None, description="folder of the file that tier disk writes; when unset, a temporary one of its own"
    )
    resident_layers: int = Field(default=0, ge=0, description="layers at the front that stay on the device")
    offload_only_non_sliding: bool = Field(
        default=False, description="keep windowed layers, which hold little, on the device"
    )
    offload_states: bool = Field(
        default=False, description="hold the states of state layers elsewhere too, whole at every step"
    )
    inner_config: dict[str, Any] = Field(default={}, description="the held backend's own keys")

    @property
    @abstractmethod
    def held(self) -> tuple[str, dict[str, Any]]:
        """The name of the backend that is held elsewhere, and its keys."""

    @model_validator(mode="after")
    def _folder_is_read(self) -> PlaceConfig:
        if self.folder is not None and self.tier != "disk":
            raise ValueError("folder is only read with tier='disk'; add it, or leave folder out")
        return self


class OffloadConfig(PlaceConfig):
    """Config of `offload`."""

    inner: str = Field(default="dynamic", description="name of the backend to hold elsewhere")

    @property
    def held(self) -> tuple[str, dict[str, Any]]:
        return self.inner, self.inner_config


class OffloadedConfig(PlaceConfig):
    """Config of `offloaded`."""

    @property
    def held(self) -> tuple[str, dict[str, Any]]:
        return "dynamic", self.inner_config


class OffloadedStaticConfig(PlaceConfig):
    """Config of `offloaded_static`."""

    offload_only_non_sliding: bool = Field(
        default=True, description="keep windowed layers, which hold little, on the device"
    )
    max_cache_len: int | None = Field(
        default=None, ge=1, description="tokens to make room for; when unset, what generate needs"
    )

    @property
    def held(self) -> tuple[str, dict[str, Any]]:
        own = {} if self.max_cache_len is None else {"max_cache_len": self.max_cache_len}
        return "static", {**self.inner_config, **own}
