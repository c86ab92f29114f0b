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

# Faults seen in its code, by the rule that each breaks; more may be found.
KNOWN = {
    "tf-dynamic": set(),
    "tf-static": set(),
    "tf-fp8": set(),
    "tf-hqq": set(),
    "tf-quanto": set(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(DISTRIBUTION))
    try:
        kvrack.resolve(name)
    except kvrack.MissingDependency as error:
        pytest.skip(str(error))
    result, output = run_suite(name, quick=True)
    print(output)
    assert result.of("passed")
    assert KNOWN[name] <= result.failed_rules, output
