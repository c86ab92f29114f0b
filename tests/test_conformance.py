"""Every installed backend that loads keeps the contract. A new plugin joins by being installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kvrack

sys.path.insert(0, str(Path(__file__).parent))
from conformance import run_suite

from kvrack_spec.checks.conftest import inner_keys
from kvrack_spec.subject import Subject

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


HELD = [name for name in INSTALLED if name not in ELSEWHERE and not inner_keys(Subject(name))]


@pytest.mark.skipif(not ELSEWHERE, reason="the disk is kvrack-offload's: pip install kvrack-offload")
def test_offload_conforms_on_disk() -> None:
    result, output = run_suite("offload", settings=("tier=disk",))
    assert result.conforms, output
    assert not result.of("expected failure")


@pytest.mark.skipif(not ELSEWHERE, reason="the disk is kvrack-offload's: pip install kvrack-offload")
@pytest.mark.parametrize(
    ("name", "inner"),
    [
        *(pytest.param("offload", (f"inner={inner}",), id=inner) for inner in HELD if inner != "dynamic"),
        *(pytest.param(name, (), id=name) for name in ELSEWHERE if name != "offload"),
    ],
)
def test_every_backend_conforms_on_disk(name: str, inner: tuple[str, ...]) -> None:
    # The run above proves what composites are as, with every backend.
    keyword = "not composite and not compile and not machine"
    result, output = run_suite(name, quick=True, keyword=keyword, settings=("tier=disk", *inner))
    assert not result.of("failed"), output
    assert not result.problems, output


@pytest.mark.parametrize("name", CODECS)
def test_installed_codec_conforms_in_static_layout(name: str) -> None:
    result, output = run_suite(name, quick=True, settings=("layout=static",))
    assert result.conforms, output
