"""kvrack-quanto: keys and values in 2 or 4 bits. Imports neither torch nor optimum-quanto until a layer is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `quanto`."""
    return Backend(
        name="quanto",
        summary="optimum-quanto, 2 or 4 bits; keys grouped per channel, values per token",
        config="kvrack_quanto.config:QuantoConfig",
        codec="kvrack_quanto.codec:QuantoCodec",
        requires=("optimum-quanto>=0.2.7",),
    )
