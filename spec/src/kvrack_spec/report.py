"""The words of a run: header, failures, and the closing table."""

from __future__ import annotations

import io
from collections import Counter, defaultdict
from typing import get_args

from rich.console import Console
from rich.table import Table

from kvrack.backend import Capabilities
from kvrack_spec import SPEC_VERSION
from kvrack_spec.result import CheckResult, Outcome, Result
from kvrack_spec.rules import rules

STYLES = {"proved": "green", "refused": "cyan", "FAILED": "bold red", "expected failure": "yellow"}


def header(result: Result) -> str:
    """Return what is tested: versions, devices, settings, and the declared capabilities."""
    promised = [name for name in Capabilities.describe() if getattr(result.capabilities, name)]
    declined = [name for name in Capabilities.describe() if not getattr(result.capabilities, name)]
    settings = ", ".join(f"{key}={value!r}" for key, value in result.settings.items()) or "defaults"
    lines = [
        f"kvrack conform {result.backend}: the rules of kvrack-spec {SPEC_VERSION}",
        "versions:  " + ", ".join(f"{name} {number}" for name, number in result.versions.items()),
        "devices:   " + ", ".join(result.devices),
        f"settings:  {settings}",
        "promised:  " + (", ".join(promised) or "nothing"),
        "declined:  " + (", ".join(declined) or "nothing"),
    ]
    if not result.capabilities.lossless:
        lines.append(f"bound:     relative_error={result.capabilities.relative_error}")
    if result.capabilities.window is not None:
        lines.append(f"shows:     window={result.capabilities.window}, sinks={result.capabilities.sinks}")
    return "\n".join(lines) + "\n"


def failures(result: Result) -> str:
    """Return each failed check, its parameters together: the promise, what was declared, expected and
    seen, and the ways to mend it."""
    groups: dict[str, list[CheckResult]] = defaultdict(list)
    for check in result.of("failed"):
        groups[check.check.partition("[")[0]].append(check)
    return "".join(_failure(result, group) for group in groups.values())


def _failure(result: Result, group: list[CheckResult]) -> str:
    check = group[0]
    more = f" (and with {len(group) - 1} other parameters)" if len(group) > 1 else ""
    lines = ["", f"FAILED {check.check}{more}"]
    lines += [f"rule {rule}: {rules().get(rule, '')}" for rule in check.rules]
    for promise in check.capabilities:
        lines.append(f"promise:  {promise}: {Capabilities.describe()[promise]}")
        lines.append(f"declared: {promise}={getattr(result.capabilities, promise)}")
    lines += check.detail.splitlines()
    lines += _mend(result, check)
    return "\n".join(lines) + "\n"


def _mend(result: Result, check: CheckResult) -> list[str]:
    if check.detail.startswith("stale"):
        return []
    ways = ["mend:     either fix the backend so that it keeps the rule,"]
    declared = [name for name in check.capabilities if getattr(result.capabilities, name)]
    declined = [name for name in check.capabilities if not getattr(result.capabilities, name)]
    if declared:
        words = ", ".join(f"{name}=False" for name in declared)
        ways.append(f"          or declare {words} in the layer's capabilities and refuse what it can't do (rule B5)")
    elif declined:
        words = ", ".join(f"{name}=True" for name in declined)
        ways.append(f"          or declare {words}, if it does work")
    elif "F2" in check.rules and not result.capabilities.lossless:
        ways.append("          or declare the larger relative_error that it has")
    elif not result.capabilities.lossless or not {"F1"} & set(check.rules):
        ways[0] = "mend:     fix the backend: this rule can't be declined;"
        ways.append("          until then list the check with its reason in --expected-failures")
    else:
        ways.append("          or declare lossless=False and the relative_error that it has")
    return ways


def table(result: Result, width: int, colour: bool) -> str:
    """Return the closing tables: capability x result, and topic x number of checks by outcome."""
    by_promise = Table(title=None, title_justify="left")
    for column in ("capability", "declared", "result", "checks"):
        by_promise.add_column(column)
    for promise, standing in result.standings().items():
        counts = Counter(check.outcome for check in result.checks if promise in check.capabilities)
        ran = ", ".join(f"{n} {word}" for word, n in counts.items() if word != "not run")
        declared = "yes" if getattr(result.capabilities, promise) else "no"
        by_promise.add_row(promise, declared, f"[{STYLES.get(standing, 'default')}]{standing}[/]", ran or "-")
    by_topic = Table()
    by_topic.add_column("topic")
    outcomes = get_args(Outcome)
    for outcome in outcomes:
        by_topic.add_column(outcome, justify="right")
    for topic in dict.fromkeys(check.topic for check in result.checks):
        counts = Counter(check.outcome for check in result.checks if check.topic == topic)
        cells = [str(counts[outcome] or "-") for outcome in outcomes]
        by_topic.add_row(topic, *cells)
    out = io.StringIO()
    console = Console(file=out, width=max(width, 79), force_terminal=colour, no_color=not colour, highlight=False)
    console.print(by_promise)
    console.print(by_topic)
    for reason, count in Counter(check.detail for check in result.of("not run")).items():
        console.print(f"not run: {count} x {reason}", markup=False)
    return "\n" + out.getvalue()
