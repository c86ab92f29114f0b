"""encoder-decoder keeps the contract, the decoder's own layers and those of cross-attention both."""

from __future__ import annotations

import subprocess
import sys

from kvrack_spec.conform import pytest_arguments


def test_encoder_decoder_conforms() -> None:
    # A process of its own: the suite is a pytest session.
    command = [sys.executable, "-m", "pytest", *pytest_arguments("encoder-decoder", quick=True)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "CONFORMS" in done.stdout
    assert "DOES NOT" not in done.stdout
