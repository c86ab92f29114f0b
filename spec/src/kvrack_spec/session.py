"""Conformance: what one pytest session does besides running the checks of one backend."""

from __future__ import annotations

import json
import platform
import random
import traceback
from collections import Counter, defaultdict
from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrack
from kvrack.config import parse_settings
from kvrack.errors import BackendLoadError, KvrackError
from kvrack.registry import installed
from kvrack_spec import SPEC_VERSION, report
from kvrack_spec.expect import Broken
from kvrack_spec.expected import ExpectedFailure, read_expected_failures
from kvrack_spec.result import CheckResult, Outcome, Result
from kvrack_spec.subject import Subject

PACKAGE = "kvrack_spec.checks"
QUICK = 4
"""Sets of parameters that a quick run keeps of each check."""

DECLINED = "declined: "
"""How the reason of a check starts that is not run because the backend doesn't promise what it proves."""


def available_devices() -> tuple[str, ...]:
    """Return the CPU, and the accelerator that torch finds, if any."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return ("cpu",) if found is None else ("cpu", found.type)


def open_backend(name: str, settings: dict[str, Any]) -> Result:
    """Return an empty result for the backend of this name, after building one of its layers.

    Raises KvrackError, with the registry's own words, when it can't be loaded or built.
    """
    resolved = kvrack.resolve(name, settings)
    try:
        capabilities = Subject(name, settings).capabilities()
    except KvrackError:
        raise
    except Exception as error:
        raise BackendLoadError(name, resolved.backend.layer or resolved.backend.codec or name, error) from error
    offered = installed().get(resolved.backend.name, ())
    versions = {"python": platform.python_version(), "torch": torch.__version__, "kvrack": kvrack.__version__}
    versions["kvrack-spec"] = _version("kvrack-spec")
    versions.update({entry_point.dist.name: entry_point.dist.version for entry_point in offered if entry_point.dist})
    return Result(name, settings, (), capabilities, versions)


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return SPEC_VERSION


class Conformance:
    """The pytest plugin object of one session: marks, records and reports its checks.

    Attributes:
        result: what was found so far.
        expected: lines of expected failures.
    """

    def __init__(self, result: Result, expected: list[ExpectedFailure], json_path: str | None) -> None:
        self.result = result
        self.expected = expected
        self.json_path = json_path

    @classmethod
    def from_config(cls, config: pytest.Config) -> Conformance:
        """Return the plugin object that the command line's options ask for. Raises KvrackError."""
        settings = parse_settings(config.getoption("--kvrack-set"))
        result = open_backend(config.getoption("--kvrack-backend"), settings)
        result.devices = tuple(config.getoption("--kvrack-device")) or available_devices()
        result.quick = config.getoption("--kvrack-quick")
        path = config.getoption("--kvrack-expected-failures")
        return cls(result, read_expected_failures(path) if path else [], config.getoption("--kvrack-json"))

    def subject(self, device: str = "cpu") -> Subject:
        """Return the backend under test on `device`."""
        return Subject(self.result.backend, self.result.settings, device, self.result.quick)

    # --- pytest's hooks -------------------------------------------------------------------------

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write(report.header(self.result))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.result.quick:
            items[:] = _sample(items)
        for item in items:
            if not _is_check(item):
                continue
            for line in self.expected:
                if line.names(_check_id(item)):
                    line.matched.append(_check_id(item))
                    item.add_marker(pytest.mark.xfail(reason=line.reason, strict=True))

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.result.selected = self.result.selected or any(map(_is_check, items))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        made = yield
        if _is_check(item) and (call.when == "call" or made.outcome != "passed"):
            self.result.checks.append(_check_result(item, call, made))
        return made

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        result = self.result
        ran = {check.check for check in result.checks if check.outcome != "not run"}
        for line in self.expected:
            if not ran.intersection(line.matched) and not (result.selected and line.matched):
                result.problems.append(f"stale expected failure, no check of this name ran: {line.check}")
        if not ran:
            result.problems.append("no check was run")
        elif not result.selected:
            unproved = [promise for promise, standing in result.standings().items() if standing == "not run"]
            result.problems += [f"{promise} was not checked" for promise in unproved]
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.OK if result.conforms else pytest.ExitCode.TESTS_FAILED
        elif session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            result.problems.append("the run was interrupted")
        if self.json_path:
            Path(self.json_path).write_text(json.dumps(result.to_dict(), indent=2) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        width = terminalreporter._tw.fullwidth
        terminalreporter.ensure_newline()
        terminalreporter.write(report.failures(self.result))
        terminalreporter.write(report.table(self.result, width, terminalreporter._tw.hasmarkup))
        terminalreporter.write_line(self.result.verdict(), green=self.result.conforms, red=not self.result.conforms)


def _sample(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items with at most `QUICK` sets of parameters of each check, the same ones each time, and of
    every kind of layer where it has them."""
    sets: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[f"{item.nodeid.partition('[')[0]} {_parameter(item, 'inner')}"].append(item)
    kept: set[str] = set()
    for check, each in sets.items():
        random.Random(check).shuffle(each)
        turns: Counter[str] = Counter()
        ranked = []
        for item in each:
            kind = _parameter(item, "kind")
            turns[kind] += 1
            ranked.append((turns[kind], kind != "full", item.nodeid))
        kept.update(nodeid for *_, nodeid in sorted(ranked)[:QUICK])
    return [item for item in items if item.nodeid in kept or item.get_closest_marker("refusal") or not _is_check(item)]


def _parameter(item: pytest.Item, name: str) -> str:
    callspec = getattr(item, "callspec", None)
    return "" if callspec is None else str(callspec.params.get(name, ""))


def _is_check(item: pytest.Item) -> bool:
    module = getattr(item, "module", None)
    return module is not None and module.__name__.startswith(PACKAGE)


def _check_id(item: pytest.Item) -> str:
    return f"{item.path.name}::{item.name}"


def _marked(item: pytest.Item, marker: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(arg for mark in item.iter_markers(marker) for arg in mark.args))


def _check_result(item: pytest.Item, call: pytest.CallInfo[None], made: pytest.TestReport) -> CheckResult:
    outcome: Outcome
    if made.outcome == "skipped" and hasattr(made, "wasxfail"):
        outcome, detail = "expected failure", made.wasxfail
    elif made.outcome == "skipped":
        outcome, detail = "not run", _skip_reason(made)
    elif made.outcome == "failed":
        outcome, detail = "failed", _failure(call)
    else:
        outcome, detail = ("refused" if item.get_closest_marker("refusal") else "passed"), ""
    capabilities = _marked(item, "capability")
    return CheckResult(_check_id(item), _marked(item, "rule"), capabilities, outcome, detail, made.duration)


def _skip_reason(made: pytest.TestReport) -> str:
    reason = made.longrepr[2] if isinstance(made.longrepr, tuple) else str(made.longrepr)
    return reason.removeprefix("Skipped: ")


def _failure(call: pytest.CallInfo[None]) -> str:
    if call.excinfo is None:
        return "stale expected failure: it passes. Remove its line"
    error = call.excinfo.value
    if isinstance(error, Broken):
        return f"expected: {error.expected}\nseen:     {error.seen}"
    frames = traceback.extract_tb(error.__traceback__)
    own = str(Path(__file__).parent)
    culprit = next((frame for frame in reversed(frames) if not frame.filename.startswith(own)), frames[-1])
    check = next((frame for frame in reversed(frames) if frame.filename.startswith(own)), frames[-1])
    text = "; ".join(line for line in str(error).splitlines() if line.strip())[:600]
    return (
        f"expected: {check.line} to work\n"
        f"seen:     {type(error).__name__}: {text}\n"
        f"          at {culprit.filename}:{culprit.lineno} in {culprit.name}"
    )
