"""kvrack-mamba: states of fixed size, alone or beside attention. Imports no torch until a layer is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `mamba`."""
    return Backend(
        name="mamba",
        summary="convolution and recurrent states in place; attention layers from any backend",
        layer="kvrack_mamba.build:build",
        config="kvrack_mamba.config:MambaConfig",
        states=True,
    )
