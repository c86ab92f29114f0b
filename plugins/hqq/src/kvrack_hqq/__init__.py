"""kvrack-hqq: keys and values in 1 to 8 bits. Imports neither torch nor hqq until a layer is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `hqq`."""
    return Backend(
        name="hqq",
        summary="HQQ, 1 to 8 bits; keys grouped per channel, values per token",
        config="kvrack_hqq.config:HqqConfig",
        codec="kvrack_hqq.codec:HqqCodec",
        requires=("hqq>=0.2.8",),
    )
