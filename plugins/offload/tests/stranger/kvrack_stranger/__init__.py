"""A backend of somebody who never heard of placements: it keeps tensors and nothing else."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `stranger`."""
    return Backend(name="stranger", summary="two plain tensors a layer", layer="kvrack_stranger.layer:StrangerLayer")
