"""A fake installed distribution: a good backend on core's own buffers, a wrong one, and one that can't be built."""

from kvrack import Backend, hookimpl

LAYERS = {"fake": "Fake", "fake-wrong": "CropsTooMuch", "fake-unbuildable": "Missing"}


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend of this name."""
    return Backend(
        name=name, summary="fake", layer=f"kvrack_fake.layer:{LAYERS[name]}", config="kvrack_fake.layer:FakeConfig"
    )
