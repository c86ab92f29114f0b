"""The preallocated layer: a PreallocatedLayer over plain memory."""

from __future__ import annotations

from pydantic import Field

from kvrack import BackendConfig, BuildContext, Capabilities, LayerSpec, PreallocatedLayer


class StaticConfig(BackendConfig):
    """Config of `static`."""

    max_cache_len: int | None = Field(
        default=None, ge=1, description="tokens to make room for; when unset, what generate needs"
    )
    attend_prefix: bool = Field(
        default=True,
        description="show attention a prefix of 256, 512, 1024, ... slots that holds what is used; "
        "False: always all of them, one shape for life",
    )


class StaticLayer(PreallocatedLayer):
    """Keys and values in preallocated memory, written in place; unused slots are returned for a mask to hide."""

    def __init__(self, spec: LayerSpec, config: StaticConfig, context: BuildContext) -> None:
        super().__init__(spec, config, context, capacity=config.max_cache_len, attend_prefix=config.attend_prefix)

    @property
    def capabilities(self) -> Capabilities:
        return self._promises(compiles=True)
