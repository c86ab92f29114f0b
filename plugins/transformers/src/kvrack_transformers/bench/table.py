"""A benchmark's result as tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from kvrack.commands import table
from kvrack_transformers.bench.results import Bench, Context, Measurement

NOTHING = "-"


def milliseconds(seconds: float | None) -> str:
    """Return a time for a reader, in milliseconds."""
    return NOTHING if seconds is None else f"{seconds * 1e3:.1f}" if seconds >= 1e-3 else f"{seconds * 1e3:.3f}"


def size(nbytes: float | None) -> str:
    """Return a number of bytes for a reader."""
    return NOTHING if nbytes is None else decimal(int(nbytes))


def times(ours: float | None, theirs: float | None) -> str:
    """Return how many times `theirs` is as large as `ours`."""
    return NOTHING if ours is None or theirs is None or ours == 0 else f"{theirs / ours:.2f}x"


def part(ours: float | None, theirs: float | None) -> str:
    """Return `ours` as a part of `theirs`."""
    return NOTHING if ours is None or theirs is None or theirs == 0 else f"{ours / theirs:.2f}"


def divergence(kl: float | None) -> str:
    """Return a KL divergence for a reader; what is only rounding shows as 0."""
    return NOTHING if kl is None else "0" if kl < 1e-8 else f"{kl:.2g}" if kl >= 1e-3 else f"{kl:.1e}"


def spread_text(measurement: Measurement) -> str:
    """Return a decode step's median and the smallest and largest of the repeats' medians, in milliseconds."""
    spread = measurement.spread
    if spread is None:
        return NOTHING
    return f"{milliseconds(measurement.step)} ({milliseconds(spread[0])} to {milliseconds(spread[1])})"


def percent(share: float | None) -> str:
    """Return a share for a reader."""
    return NOTHING if share is None else f"{share:.0%}"


def heading(bench: Bench) -> str:
    """Return what was measured, in a sentence."""
    asked, machine = bench.request, bench.machine
    rows = "" if asked.batch == 1 else f", {asked.batch} rows"
    return (
        f"{asked.model}, {asked.dtype}{rows}, on {machine.device}: {machine.processor}, {machine.threads} "
        f"thread{'s' if machine.threads != 1 else ''}, torch {machine.versions.get('torch', '?')}, "
        f"transformers {machine.versions.get('transformers', '?')}"
    )


def context_line(bench: Bench, context: Context) -> str:
    """Return what was measured of one prompt, in a sentence."""
    speed = "" if context.bandwidth is None else f"; memory read at {context.bandwidth / 1e9:.1f} GB/s"
    return f"{context.tokens:,} tokens of prompt, {context.held:,} held at the end{speed}"


def render(bench: Bench, console: Console) -> None:
    """Print the result."""
    console.print(heading(bench), soft_wrap=True)
    for context in bench.contexts:
        console.print(f"\n{context_line(bench, context)}", style="bold", soft_wrap=True)
        console.print(_figures(context))
        if bench.request.against:
            console.print()
            console.print(_ratios(context))
        for each in context.measurements:
            if each.error is not None:
                console.print(f"{each.label} failed: {each.error}", soft_wrap=True)
    for name, reason in bench.left_out.items():
        console.print(f"{name} wasn't measured: {reason}", soft_wrap=True)
    if bench.interrupted:
        console.print("interrupted: what was measured until then")


def _figures(context: Context) -> Table:
    moving = any(each.moved_in for each in context.measurements)
    columns = ["cache", "prefill s", "step ms", "of floor", "stored", "peak", "KL", "perplexity"]
    rows = table(*columns, *(["moved/step"] if moving else []))
    for each in context.measurements:
        name = each.label + (" (dense)" if each is context.reference else "")
        cells = [
            name,
            NOTHING if each.prefill is None else f"{each.prefill:.2f}",
            spread_text(each),
            percent(each.share),
            size(each.stored_bytes),
            size(each.peak_bytes),
            divergence(each.kl),
            NOTHING if each.perplexity is None else f"{each.perplexity:.3f}",
        ]
        rows.add_row(*cells, *([size(each.moved_in)] if moving else []))
    return rows


def _ratios(context: Context) -> Table:
    rows = table("kvrack / transformers", "prefill", "decode", "stored", "peak", "KL")
    for ours, other in context.pairs():
        if other is None:
            continue
        rows.add_row(
            ours.cache,
            f"{times(ours.prefill, other.prefill)} as fast",
            f"{times(ours.step, other.step)} as fast",
            part(ours.stored_bytes, other.stored_bytes),
            part(ours.peak_bytes, other.peak_bytes),
            f"{divergence(ours.kl)} / {divergence(other.kl)}",
        )
    return rows
