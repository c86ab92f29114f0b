"""The layer that core puts around a codec keeps the contract, with first tokens kept exact and without."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from conformance import put_on_path, run_suite

from kvrack import registry

PLUGIN = Path(__file__).parent / "core" / "codec_plugin"


@pytest.mark.parametrize("settings", [("sink_tokens=5",), ("sink_tokens=40", "residual_length=0")], ids=str)
def test_a_codec_with_sinks_conforms(monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]) -> None:
    put_on_path(monkeypatch, PLUGIN)
    registry.refresh()
    result, output = run_suite("test-int4", quick=True, keyword="not compile", settings=settings)
    assert not result.of("failed"), output
    assert not result.problems, output
