"""Two results side by side: ratios, and what differs in machine and request."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvrack.commands import table
from kvrack_transformers.bench.results import Bench, Context, Machine, Request
from kvrack_transformers.bench.table import NOTHING, divergence, milliseconds, part, size


def differences(first: Bench, second: Bench) -> list[tuple[str, str, str]]:
    """Return what machine and request don't have in common: its name, and what it is in each."""
    found = []
    parts: list[tuple[Machine | Request, Machine | Request]] = [
        (first.machine, second.machine),
        (first.request, second.request),
    ]
    for one, other in parts:
        left, right = one.model_dump(), other.model_dump()
        for name in left:
            if name == "versions":
                for each in sorted({*left[name], *right[name]}):
                    if left[name].get(each) != right[name].get(each):
                        found.append((each, left[name].get(each, NOTHING), right[name].get(each, NOTHING)))
            elif left[name] != right[name]:
                found.append((name, _text(left[name]), _text(right[name])))
    if first.interrupted != second.interrupted:
        found.append(("interrupted", _text(first.interrupted), _text(second.interrupted)))
    return found


def render_comparison(first: Bench, second: Bench, names: tuple[Path, Path], console: Console) -> None:
    """Print each cache's figures in both, and the second's as a part of the first's."""
    console.print(f"A: {names[0]}, {first.created}\nB: {names[1]}, {second.created}", soft_wrap=True)
    different = differences(first, second)
    if different:
        console.print("\nWhat differs:", style="bold")
        rows = table("", "A", "B")
        for row in different:
            rows.add_row(*row)
        console.print(rows)
    else:
        console.print("Machine and request are the same.")
    others = {context.tokens: context for context in second.contexts}
    shared = [(context, others[context.tokens]) for context in first.contexts if context.tokens in others]
    for one, other in shared:
        console.print(f"\n{one.tokens:,} tokens of prompt", style="bold")
        console.print(_ratios(one, other))
    if not shared:
        console.print("They have no context in common, so there is nothing to compare.")


def _ratios(first: Context, second: Context) -> Table:
    rows = table("cache", "step ms A", "B", "B/A", "prefill B/A", "stored B", "B/A", "peak B/A", "KL A", "KL B")
    keys = dict.fromkeys([each.key for each in (*first.measurements, *second.measurements)])
    for key in keys:
        one, other = first.find(key), second.find(key)
        known = one or other
        assert known is not None
        rows.add_row(
            known.label,
            milliseconds(one.step) if one else NOTHING,
            milliseconds(other.step) if other else NOTHING,
            part(other.step, one.step) if one and other else NOTHING,
            part(other.prefill, one.prefill) if one and other else NOTHING,
            size(other.stored_bytes) if other else NOTHING,
            part(other.stored_bytes, one.stored_bytes) if one and other else NOTHING,
            part(other.peak_bytes, one.peak_bytes) if one and other else NOTHING,
            divergence(one) if one else NOTHING,
            divergence(other) if other else NOTHING,
        )
    return rows


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
