"""encoder-decoder keeps the contract, the decoder's own layers and those of cross-attention both."""

from __future__ import annotations

from kvrack_spec.conform import expect_conformance


def test_encoder_decoder_conforms() -> None:
    expect_conformance("encoder-decoder", quick=True)
