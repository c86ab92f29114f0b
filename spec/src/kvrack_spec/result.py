"""What a run of the suite found, check by check, and the verdict that follows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from kvrack.backend import Capabilities
from kvrack_spec import SPEC_VERSION

Outcome = Literal["passed", "refused", "expected failure", "failed", "not run"]

QUALITIES = ("compiles", "stable_address", "lossless")
"""Promises with no call of their own: where not made, there is nothing to refuse."""


@dataclass(frozen=True)
class CheckResult:
    """One check with its parameters.

    Attributes:
        check: its id, ``test_crop.py::test_name[parameters]``.
        rules: rules of SPEC.md that it proves.
        capabilities: promises that it proves, or whose refusal it proves.
        outcome: what came of it.
        detail: what was seen, or why it was not run.
        seconds: how long it took.
    """

    check: str
    rules: tuple[str, ...]
    capabilities: tuple[str, ...]
    outcome: Outcome
    detail: str = ""
    seconds: float = 0.0

    @property
    def topic(self) -> str:
        """Name of its file, without the test_ and the ending, as words."""
        return self.check.partition("::")[0].removeprefix("test_").removesuffix(".py").replace("_", " ")


@dataclass
class Result:
    """The checks of one run, and what the backend promises.

    Attributes:
        backend: name tested.
        settings: the config it was tested with.
        devices: devices it was tested on.
        capabilities: what its full layer promises.
        versions: of what took part, by name.
        checks: each check's result, in order.
        problems: what is wrong besides failed checks: stale lines of expected failures, nothing run.
        selected: whether only some checks were asked for.
        quick: whether they ran with fewer shapes.
    """

    backend: str
    settings: dict[str, Any]
    devices: tuple[str, ...]
    capabilities: Capabilities
    versions: dict[str, str]
    checks: list[CheckResult] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    selected: bool = False
    quick: bool = False

    def of(self, outcome: Outcome) -> list[CheckResult]:
        """Return the checks of this outcome."""
        return [check for check in self.checks if check.outcome == outcome]

    @property
    def conforms(self) -> bool:
        """Whether nothing failed and something ran."""
        return not self.of("failed") and not self.problems and bool(self.of("passed"))

    @property
    def failed_rules(self) -> set[str]:
        """Rules cited by the checks that failed."""
        return {rule for check in self.of("failed") for rule in check.rules}

    def standing(self, promise: str) -> str:
        """Return what is known of one promise: one of proved, refused, not promised, FAILED, expected
        failure, not run."""
        outcomes = Counter(check.outcome for check in self.checks if promise in check.capabilities)
        declared = getattr(self.capabilities, promise)
        if outcomes["failed"]:
            return "FAILED"
        if outcomes["expected failure"]:
            return "expected failure"
        if declared:
            return "proved" if outcomes["passed"] else "not run"
        if outcomes["refused"]:
            return "refused"
        return "not promised" if promise in QUALITIES else "not run"

    def standings(self) -> dict[str, str]:
        """Return the standing of each promise."""
        return {promise: self.standing(promise) for promise in Capabilities.describe()}

    def verdict(self) -> str:
        """Return the verdict in one line."""
        counts = Counter(self.standings().values())
        total = sum(counts.values())
        parts = [
            f"{counts['proved']} of {total} capabilities",
            f"{counts['refused']} refused as declared",
            *(f"{counts[word]} {word}" for word in ("not promised", "expected failure", "not run") if counts[word]),
            f"{len(self.of('failed'))} failed",
        ]
        if expected := len(self.of("expected failure")):
            parts.append(f"{expected} expected failures")
        if self.problems:
            parts.append("; ".join(self.problems))
        if not self.conforms:
            word = "DOES NOT CONFORM"
        elif self.selected:
            word = f"PASSES WHAT WAS SELECTED, {len(self.checks)} checks"
        else:
            word = "CONFORMS"
        return f"{word} (kvrack-spec {SPEC_VERSION}{', quick' if self.quick else ''}): {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-able data with everything that the report says."""
        return {
            "spec": SPEC_VERSION,
            "backend": self.backend,
            "settings": self.settings,
            "devices": list(self.devices),
            "versions": self.versions,
            "conforms": self.conforms,
            "verdict": self.verdict(),
            "problems": self.problems,
            "capabilities": {
                promise: {"declared": getattr(self.capabilities, promise), "result": standing}
                for promise, standing in self.standings().items()
            },
            "relative_error": self.capabilities.relative_error,
            "window": self.capabilities.window,
            "sinks": self.capabilities.sinks,
            "checks": [
                {
                    "check": check.check,
                    "rules": list(check.rules),
                    "capabilities": list(check.capabilities),
                    "outcome": check.outcome,
                    "detail": check.detail,
                    "seconds": round(check.seconds, 4),
                }
                for check in self.checks
            ],
        }
