"""kvrack-offload: any backend, held in host memory or on disk. Imports no torch until a layer is built."""

from kvrack import Backend, hookimpl

_SUMMARIES = {
    "offload": "any backend, held in host memory or on disk; only new tokens travel out",
    "offloaded": "dynamic, held in host memory or on disk",
    "offloaded_static": "static, held in host memory or on disk; windowed layers stay on the device",
}
_CONFIGS = {"offload": "OffloadConfig", "offloaded": "OffloadedConfig", "offloaded_static": "OffloadedStaticConfig"}


@hookimpl
def kvrack_backend(name: str) -> Backend | None:
    """Return the backend of this name."""
    if name not in _CONFIGS:
        return None
    return Backend(
        name=name,
        summary=_SUMMARIES[name],
        layer="kvrack_offload.build:build_layer",
        states=True,
        config=f"kvrack_offload.config:{_CONFIGS[name]}",
    )
