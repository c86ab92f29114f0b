"""kvrack-fp8: keys and values as 8-bit floats. Imports no torch until a layer is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `fp8`."""
    return Backend(
        name="fp8",
        summary="float8_e4m3fn, a scale for each token and head; about half of bfloat16's bytes",
        codec="kvrack_fp8.codec:Fp8Codec",
    )
