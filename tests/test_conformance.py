"""Every installed backend that loads keeps the contract. A new plugin joins by being installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kvrack

sys.path.insert(0, str(Path(__file__).parent))
from conformance import run_suite

INSTALLED = [name for name, info in kvrack.backends().items() if info.error is None]

HOLDERS = [name for name in ("mamba", "encoder-decoder") if name in INSTALLED]
"""What attends in these is dynamic's, which is judged in full by its own name."""

CODECS = [name for name in INSTALLED if issubclass(kvrack.resolve(name).backend.config_class(), kvrack.LayoutConfig)]


def test_there_are_backends_to_judge() -> None:
    assert "dynamic" in INSTALLED


@pytest.mark.parametrize("name", INSTALLED)
def test_installed_backend_conforms(name: str) -> None:
    quick = name in HOLDERS
    result, output = run_suite(name, quick=quick)
    assert result.conforms, output
    assert not result.of("expected failure")
    assert result.verdict().startswith(f"CONFORMS (kvrack-spec 1.0{', quick' if quick else ''})")


@pytest.mark.parametrize("name", CODECS)
def test_installed_codec_conforms_in_static_layout(name: str) -> None:
    result, output = run_suite(name, quick=True, settings=("layout=static",))
    assert result.conforms, output
