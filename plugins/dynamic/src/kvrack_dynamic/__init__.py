"""kvrack-dynamic: keys and values that grow as tokens come. Imports no torch until a layer is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `dynamic`."""
    return Backend(
        name="dynamic",
        summary="grows as tokens come; full, sliding and chunked layers; exact",
        layer="kvrack_dynamic.layer:DynamicLayer",
        config="kvrack_dynamic.layer:DynamicConfig",
    )
