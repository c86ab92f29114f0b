"""transformers' own cache layers as backends, for the suite to judge: nothing is mended on the way."""

from kvrack import Backend, hookimpl

REQUIRES = {"tf-hqq": ("hqq",), "tf-quanto": ("optimum-quanto",)}


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend of this name."""
    return Backend(
        name=name,
        summary="transformers' own layer, as it is",
        layer=f"kvrack_tf.layer:{name.removeprefix('tf-')}",
        requires=REQUIRES.get(name, ()),
    )
