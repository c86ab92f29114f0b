"""mamba keeps the contract, its states and its attention layers both."""

from __future__ import annotations

import subprocess
import sys

from kvrack_spec.conform import pytest_arguments


def test_mamba_conforms() -> None:
    # A process of its own: the suite is a pytest session.
    command = [sys.executable, "-m", "pytest", *pytest_arguments("mamba", quick=True)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "CONFORMS" in done.stdout
    assert "DOES NOT" not in done.stdout
