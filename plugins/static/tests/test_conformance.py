"""static keeps the contract in all its configs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvrack_spec.conform import pytest_arguments


@pytest.mark.parametrize("settings", [(), ("attend_prefix=false",), ("max_cache_len=600",)], ids=str)
def test_static_conforms(settings: tuple[str, ...]) -> None:
    # A process of its own: the suite is a pytest session.
    command = [sys.executable, "-m", "pytest", *pytest_arguments("static", settings, quick=True)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "CONFORMS" in done.stdout
    assert "DOES NOT" not in done.stdout
