"""The suite judged: each wrong backend fails the rules that name its fault and no other, each good one none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrack.registry import installed
from kvrack_spec.result import Result

sys.path.insert(0, str(Path(__file__).parent))
from conformance import run_suite

DISTRIBUTION = Path(__file__).parent / "wrong_backends"

# What each fault breaks. Where it says L29, random sequences meet the fault too. B4, "a promise that is True holds", is
# cited besides by every check that proves a promise, and left out.
WRONG = {
    "wrong-loose-config": "B2",
    "wrong-imports-torch": "B6",
    "wrong-holder": "B8",
    "wrong-states-reorder": "S4",
    "wrong-states-crop": "S5",
    "wrong-states-reset": "S3 S6",
}

SLOW = "compile"
"""Compiling takes most of a quick run, so the backends whose fault isn't there go without those checks."""


@pytest.fixture(autouse=True)
def _wrong_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DISTRIBUTION))


def _names(start: str) -> list[str]:
    text = (DISTRIBUTION / "kvrack_wrong-1.0.dist-info" / "entry_points.txt").read_text(encoding="utf-8")
    return [line.partition(" = ")[0] for line in text.splitlines() if line.startswith(start)]


def _failed(result: Result) -> set[str]:
    assert not result.problems or result.selected, result.problems
    return result.failed_rules - {"B4"}


@pytest.mark.parametrize("name", _names("good-"))
def test_a_good_backend_conforms(name: str) -> None:
    result, output = run_suite(name, quick=True)
    assert not result.of("failed"), output
    assert result.conforms, output
    assert result.verdict().startswith("CONFORMS")


@pytest.mark.parametrize("name", _names("wrong-"))
def test_a_wrong_backend_fails_what_names_its_fault(name: str) -> None:
    compiled = "L30" in WRONG[name]
    result, output = run_suite(name, quick=True, keyword=None if compiled else f"not {SLOW}")
    assert _failed(result) == set(WRONG[name].split()), output
    assert not result.conforms
    assert result.verdict().startswith("DOES NOT CONFORM")


def test_every_backend_of_the_distribution_is_judged() -> None:
    assert {name for name in installed() if name.startswith("wrong-")} == set(WRONG)
    assert len(WRONG) >= 15
