"""kvrack-sinks: the kvrack backend `sinks`. Imports no torch: its layer is imported when a cache is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `sinks`."""
    return Backend(
        name="sinks",
        summary="the first tokens and a sliding window, so that memory stays bounded (StreamingLLM)",
        layer="kvrack_sinks.layer:SinkLayer",
        config="kvrack_sinks.layer:SinkConfig",
    )
