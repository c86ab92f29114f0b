"""A backend as a stranger installs one: light, and importing no torch."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `plain`."""
    return Backend(
        name="plain",
        summary="two buffers a layer, nothing else",
        layer="plain_rack.layer:PlainLayer",
        config="plain_rack.layer:PlainConfig",
    )
