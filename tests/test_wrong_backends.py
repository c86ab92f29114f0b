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
    "wrong-states-reorder": "S4 S12",
    "wrong-states-crop": "S5 S12",
    "wrong-states-reset": "S3 S6",
    "wrong-states-copies": "S10",
    "wrong-states-move": "S11",
    "wrong-states-halfway": "S9",
    "wrong-states-short": "S8 S9",
    "wrong-hybrid-reorder": "S12",
    "wrong-cross-cropped": "X3",
    "wrong-cross-mixes": "X4",
    "wrong-cross-windowed": "X1 X2",
    "wrong-repeat-forgets": "L15 L29",
    "wrong-reorder-forgets-values": "L14 L29 C10",
    "wrong-index-half-done": "L17",
    "wrong-length-tensor": "L5",
    "wrong-swallows-arguments": "L1",
    "wrong-reset-leaves-tail": "L23 D6 L29",
    "wrong-window-too-long": "L7 L29",
    "wrong-mask-too-long": "L6",
    "wrong-mask-forgets-offset": "L6",
    "wrong-copy-shares": "D2",
    "wrong-fork-writes-through": "D2 D7 L29",
    "wrong-save-forgets": "D3",
    "wrong-crop-below-zero": "L19 L29",
    "wrong-crop-half-done": "L21 C3 D2 L29",
    "wrong-crop-counts-wrongly": "L18 L21 L22 D7 L29",
    "wrong-crop-raises": "L18 L19 L20 L21 L22 D2 D7 L29",
    "wrong-crop-takes-positive": "L20",
    "wrong-recording-forgets": "L22",
    "wrong-early-init-dtype": "L24",
    "wrong-offload-forgets": "L25 L29",
    "wrong-aliases": "L10",
    "wrong-keeps-grad": "L26",
    "wrong-newest-first": "L3 L6 F1 F4 F5 L29",
    "wrong-casts-dtype": "L4",
    "wrong-returns-float": "L2",
    "wrong-refuses-in-silence": "B5",
    "wrong-heads-of-its-spec": "L37",
    "wrong-indices-stay-behind": "C10",
    "wrong-refuses-without-name": "B5",
    "wrong-changes-its-promise": "B3",
    "wrong-scratch-is-shared": "L11",
    "wrong-moves-address": "L31",
    "wrong-breaks-graph": "L30",
    "wrong-initialized-too-soon": "B1",
    "wrong-hides-memory": "L13",
    "wrong-predicts-too-little": "C8",
    "wrong-capacity-in-silence": "L9 B5",
    "wrong-select-cuts-tail-only": "L16 C4 L29 C10",
    "wrong-reorder-forgets-scales": "L14 L29",
    "wrong-bound-understated": "F2 L29",
    "wrong-says-lossless": "F1 L26 L29",
    "wrong-clips-later": "F5",
    "wrong-encodes-again": "F4",
    "wrong-nan-from-zeros": "F3",
    "wrong-tail-too-short": "F6",
    "wrong-scale-over-batch": "F7 L14 L16",
    "wrong-too-few-sinks": "F8",
}

SLOW = "compile"
"""Compiling takes most of a quick run, so the backends whose fault isn't there go without those checks."""

STATES = "test_states"
"""What attends in the backends of wrong states is dynamic's, which is judged elsewhere."""

CROSS = "test_cross_attention"

WITHOUT_WRONG = "not wrong"
"""For backends that hold another: not each of the wrong ones."""


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
    result, output = run_suite(name, quick=True, keyword=WITHOUT_WRONG if name == "good-holder" else None)
    assert not result.of("failed"), output
    assert result.conforms, output
    assert result.verdict().startswith("PASSES WHAT WAS SELECTED" if name == "good-holder" else "CONFORMS")


@pytest.mark.parametrize("name", _names("wrong-"))
def test_a_wrong_backend_fails_what_names_its_fault(name: str) -> None:
    without = WITHOUT_WRONG if name == "wrong-holder" else f"not {SLOW}"
    if name.startswith(("wrong-states", "wrong-hybrid")):
        without = STATES
    if name.startswith("wrong-cross"):
        without = CROSS
    result, output = run_suite(name, quick=True, keyword=None if "L30" in WRONG[name] else without)
    assert _failed(result) == set(WRONG[name].split()), output
    assert not result.conforms
    assert result.verdict().startswith("DOES NOT CONFORM")


def test_every_backend_of_the_distribution_is_judged() -> None:
    assert {name for name in installed() if name.startswith("wrong-")} == set(WRONG)
    assert len(WRONG) >= 15
