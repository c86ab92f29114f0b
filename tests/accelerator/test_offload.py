"""Offload from an accelerator keeps the contract and answers as the held backend does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a CUDA, XPU or MPS device to offload from"),
]
pytest.importorskip("kvrack_offload", reason="offloading is kvrack-offload's: pip install kvrack-offload")


def test_the_whole_check() -> None:
    script = Path(__file__).parent / "check_offload.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_conformance_on_the_device(tier: str) -> None:
    from kvrack_spec.conform import pytest_arguments, run_conformance

    device = torch.accelerator.current_accelerator().type
    _, result = run_conformance(pytest_arguments("offload", (f"tier={tier}",), devices=(device,), quick=True))
    assert result is not None
    assert not result.of("failed"), [check.check for check in result.of("failed")]
