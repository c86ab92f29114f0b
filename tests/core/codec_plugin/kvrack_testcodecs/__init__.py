"""A fake installed plugin with two codecs: one that encodes each token, one that encodes blocks."""

import kvrack
from kvrack import Backend


@kvrack.hookimpl
def kvrack_backend(name: str) -> Backend | None:
    if name == "test-int8":
        return Backend(
            name="test-int8",
            summary="8-bit integers, a scale per token and head",
            codec="kvrack_testcodecs.codec:Int8Codec",
        )
    return Backend(
        name="test-int4",
        summary="4-bit integers, a range per channel over 32 tokens for keys, per token for values",
        config="kvrack_testcodecs.codec:Int4Config",
        codec="kvrack_testcodecs.codec:Int4Codec",
    )
