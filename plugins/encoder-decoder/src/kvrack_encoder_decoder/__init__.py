"""kvrack-encoder-decoder: a decoder's own tokens and an encoder's. Imports no torch until a layer is built."""

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    """Return the backend `encoder-decoder`."""
    return Backend(
        name="encoder-decoder",
        summary="self-attention and cross-attention, each from any backend",
        layer="kvrack_encoder_decoder.layer:build",
        config="kvrack_encoder_decoder.config:EncoderDecoderConfig",
        cross_attention=True,
    )
