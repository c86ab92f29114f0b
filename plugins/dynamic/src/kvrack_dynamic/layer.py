"""The growable layer: a BufferedLayer whose buffers grow geometrically."""

from __future__ import annotations

from pydantic import Field

from kvrack import BackendConfig, BufferedLayer, BuildContext, Capabilities, LayerSpec


class DynamicConfig(BackendConfig):
    """Config of `dynamic`."""

    growth: float = Field(
        default=1.25,
        gt=1.0,
        le=4.0,
        description="factor by which memory grows when it is full; more means fewer moves and more spare room",
    )


class DynamicLayer(BufferedLayer):
    """Keys and values in two buffers that grow by `growth`, given back as strided views.

    A token is moved 1 / (growth - 1) times on average, where concatenation moves all of them at
    every step.
    """

    def __init__(self, spec: LayerSpec, config: DynamicConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context, growth=config.growth)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            grows=True,
            slides=True,
            chunks=True,
            chunked_prefill=True,
            unequal_head_dim=True,
            crops=True,
            records_past=True,
            early_init=True,
            offloads=True,
            compiles=True,
            lossless=True,
        )
