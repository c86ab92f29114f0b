"""transformers' own layers before the suite: it runs over them to the end, and finds what is known of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import kvrack

pytest.importorskip("transformers", reason="judges transformers' own layers")

sys.path.insert(0, str(Path(__file__).parent))
from conformance import run_suite

DISTRIBUTION = Path(__file__).parent / "transformers_layers"

# Faults that its own code shows, by the rule that each breaks; the suite may find more.
KNOWN = {
    # shows 2 tokens in a window of 1; holds what requires grad; is not told from another batch; a half-refused crop
    "tf-dynamic": {"L7", "L26", "L4", "C3"},
    # a tensor as length; no batch operations; writes past its capacity; keeps its batch through reset; crops below zero
    "tf-static": {"L5", "L15", "L16", "L9", "L23", "L19"},
    # batch operations that act on an empty tail, not on the codes; a scale frozen by the first update; no codes in keys
    "tf-fp8": {"L15", "L16", "F5", "F2", "L28"},
    # encodes all that it holds again at each flush
    "tf-hqq": {"F4", "L15", "L16"},
    "tf-quanto": {"F4", "L15", "L16"},
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DISTRIBUTION))
    try:
        kvrack.resolve(name)
    except kvrack.MissingDependency as error:
        pytest.skip(str(error))
    result, output = run_suite(name, quick=True)
    assert result.of("passed")
    assert KNOWN[name] <= result.failed_rules, output
