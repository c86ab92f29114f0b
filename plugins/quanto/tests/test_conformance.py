"""quanto keeps the contract in the configs that differ in kind; as installed, tests/test_conformance.py judges it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvrack_spec.conform import pytest_arguments

CONFIGS = [
    ("nbits=2", "q_group_size=4", "residual_length=3", "sink_tokens=2"),
    ("axis_key=0", "axis_value=-1", "q_group_size=30", "residual_length=0"),
]


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_quanto_conforms(settings: tuple[str, ...]) -> None:
    # A process of its own: the suite is a pytest session.
    command = [sys.executable, "-m", "pytest", *pytest_arguments("quanto", settings, quick=True)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "CONFORMS" in done.stdout
    assert "DOES NOT" not in done.stdout
