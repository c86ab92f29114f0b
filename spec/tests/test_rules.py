"""SPEC.md and the checks agree: every rule has a check, every check cites a rule, every promise is proved."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterator
from importlib import import_module
from types import FunctionType

import pytest

import kvrack_spec
from kvrack.backend import Capabilities
from kvrack_spec import checks
from kvrack_spec.rules import rules, spec_path, version


def _checks() -> Iterator[tuple[str, FunctionType]]:
    for module in pkgutil.iter_modules(checks.__path__):
        if module.name.startswith("test_"):
            found = inspect.getmembers(import_module(f"{checks.__name__}.{module.name}"), inspect.isfunction)
            yield from ((f"{module.name}.py::{name}", each) for name, each in found if name.startswith("test_"))


CHECKS = dict(_checks())


def _marked(check: FunctionType, marker: str) -> list[str]:
    return [arg for mark in getattr(check, "pytestmark", []) if mark.name == marker for arg in mark.args]


def test_the_version_is_the_distributions() -> None:
    assert version() == kvrack_spec.SPEC_VERSION


def test_rules_are_found_and_numbered_without_gaps_or_repeats() -> None:
    text = spec_path().read_text(encoding="utf-8")
    assert text.count("- **") == len(rules()) + text.count("- **What"), (
        "a rule that the pattern misses, or an id used twice"
    )
    for letter in "BLCFSXD":
        numbers = [int(rule[1:]) for rule in rules() if rule[0] == letter]
        assert numbers == list(range(1, len(numbers) + 1)), f"{letter}: {numbers}"


@pytest.mark.parametrize("rule", rules())
def test_every_rule_has_a_check(rule: str) -> None:
    assert any(rule in _marked(check, "rule") for check in CHECKS.values()), f"no check cites {rule}"


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_cites_rules_that_exist(check: str) -> None:
    cited = _marked(CHECKS[check], "rule")
    assert cited, f"{check} cites no rule"
    assert not set(cited) - set(rules())


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_names_promises_that_exist(check: str) -> None:
    assert not set(_marked(CHECKS[check], "capability")) - set(Capabilities.describe())


@pytest.mark.parametrize("promise", Capabilities.describe())
def test_every_promise_is_proved_by_a_check(promise: str) -> None:
    proofs = [name for name, check in CHECKS.items() if promise in _marked(check, "capability")]
    assert proofs, f"nothing proves {promise}"
    assert any("B4" in _marked(CHECKS[name], "rule") for name in proofs)
