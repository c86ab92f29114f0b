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


ELSEWHERE = [name for name in INSTALLED if hasattr(kvrack.resolve(name).config, "tier")]
"""What holds a layer in another place; without an accelerator, only a disk is one."""


@pytest.mark.parametrize("name", [name for name in INSTALLED if name not in ELSEWHERE])
def test_installed_backend_conforms(name: str) -> None:
    quick = name in HOLDERS
    result, output = run_suite(name, quick=quick)
    assert result.conforms, output
    assert not result.of("expected failure")
    assert result.verdict().startswith(f"CONFORMS (kvrack-spec 1.0{', quick' if quick else ''})")


@pytest.mark.parametrize("name", ELSEWHERE)
def test_installed_backend_conforms_on_disk(name: str) -> None:
    result, output = run_suite(name, quick=name != "offload", settings=("tier=disk",))
    assert result.conforms, output
    assert not result.of("expected failure")


@pytest.mark.parametrize("inner", [name for name in INSTALLED if name not in (*ELSEWHERE, "dynamic")])
def test_every_installed_backend_conforms_on_disk(inner: str) -> None:
    pytest.importorskip("kvrack_offload", reason="the disk is kvrack-offload's: pip install kvrack-offload")
    # What composites are as of is proved by the full run over `dynamic`, kernels compiled by each backend's own.
    keyword = "not composite and not compile and not machine"
    result, output = run_suite("offload", quick=True, keyword=keyword, settings=("tier=disk", f"inner={inner}"))
    assert not result.of("failed"), output
    assert not result.problems, output


@pytest.mark.parametrize("name", CODECS)
def test_installed_codec_conforms_in_static_layout(name: str) -> None:
    result, output = run_suite(name, quick=True, settings=("layout=static",))
    assert result.conforms, output
