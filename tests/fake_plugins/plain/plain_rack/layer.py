"""The least layer there is over core's buffers, so that core's tests need no other distribution."""

from __future__ import annotations

from pydantic import Field

from kvrack import BackendConfig, BufferedLayer, BuildContext, Capabilities, LayerSpec


class PlainConfig(BackendConfig):
    """Config of `plain`."""

    growth: float = Field(default=1.25, gt=1.0, description="factor by which memory grows")
    capacity: int = Field(default=-1, ge=-1, description="tokens the layer says that it can take, -1 for any number")


class PlainLayer(BufferedLayer):
    """Keys and values in two growing buffers."""

    def __init__(self, spec: LayerSpec, config: PlainConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context, growth=config.growth)
        self._capacity = config.capacity

    def get_max_length(self) -> int:
        return self._capacity

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(grows=True, slides=True, chunks=True, crops=True, records_past=True, lossless=True)
