"""The verdict, from results written out by hand."""

from __future__ import annotations

import json

from kvrack.backend import Capabilities
from kvrack_spec.report import failures, header, table
from kvrack_spec.result import CheckResult, Outcome, Result


def _result(*checks: tuple[str, str, Outcome]) -> Result:
    capabilities = Capabilities(grows=True, crops=True, lossless=True)
    made = Result("b", {"nbits": 4}, ("cpu",), capabilities, {"kvrack": "1"})
    made.checks = [
        CheckResult(f"test_x.py::{name}", ("L1",), (promise,) if promise else (), outcome, "expected: a\nseen:     b")
        for name, promise, outcome in checks
    ]
    return made


def test_outcomes_are_told_apart() -> None:
    result = _result(
        ("a", "grows", "passed"),
        ("b", "crops", "expected failure"),
        ("c", "slides", "refused"),
        ("d", "lossless", "passed"),
        ("e", "offloads", "not run"),
    )
    standings = result.standings()
    assert standings["grows"] == "proved"
    assert standings["crops"] == "expected failure"
    assert standings["slides"] == "refused"
    assert standings["offloads"] == "not run"
    assert standings["compiles"] == "not promised"
    assert result.conforms
    assert result.verdict() == (
        "CONFORMS (kvrack-spec 1.0): 2 of 12 capabilities, 1 refused as declared, 2 not promised, 1 expected failure, "
        "6 not run, 0 failed, 1 expected failures"
    )


def test_a_failure_a_problem_and_nothing_do_not_conform() -> None:
    assert not _result(("a", "grows", "passed"), ("b", "", "failed")).conforms
    assert not _result().conforms
    stale = _result(("a", "grows", "passed"))
    stale.problems.append("stale")
    assert not stale.conforms
    assert stale.verdict().startswith("DOES NOT CONFORM")


def test_a_selection_does_not_say_that_it_conforms() -> None:
    result = _result(("a", "grows", "passed"))
    result.selected = True
    assert result.conforms
    assert result.verdict().startswith("PASSES WHAT WAS SELECTED, 1 checks")


def test_failures_name_promise_declaration_and_both_ways_to_mend() -> None:
    text = failures(_result(("a[1]", "crops", "failed"), ("a[2]", "crops", "failed")))
    assert "FAILED test_x.py::a[1] (and with 1 other parameters)" in text
    assert "rule L1: The protocol's methods" in text
    assert "promise:  crops: crop(-n) leaves" in text
    assert "declared: crops=True" in text
    assert "expected: a\nseen:     b" in text
    assert "either fix the backend" in text
    assert "declare crops=False" in text


def test_an_undeclinable_failure_says_so() -> None:
    assert "can't be declined" in failures(_result(("a", "", "failed")))


def test_header_table_and_json_hold_what_was_found() -> None:
    result = _result(("a", "grows", "passed"))
    assert "nbits=4" in header(result)
    assert "promised:  grows, crops, lossless" in header(result)
    assert "grows" in table(result, 80, colour=False)
    data = json.loads(json.dumps(result.to_dict()))
    assert data["capabilities"]["grows"] == {"declared": True, "result": "proved"}
    assert data["checks"][0]["outcome"] == "passed"
