"""kvrack-static: keys and values in memory of a fixed size and address. Imports no torch until a layer is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `static`."""
    return Backend(
        name="static",
        summary="preallocated, written in place, for torch.compile; full, sliding and chunked layers; exact",
        layer="kvrack_static.layer:StaticLayer",
        config="kvrack_static.layer:StaticConfig",
    )
