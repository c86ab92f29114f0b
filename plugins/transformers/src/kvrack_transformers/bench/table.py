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


def divergence(measurement: Measurement) -> str:
    """Return the KL divergence from the dense cache for a reader; what is only rounding shows as 0."""
    kl = measurement.kl
    return NOTHING if kl is None else "0" if measurement.is_exact else f"{kl:.2g}" if kl >= 1e-3 else f"{kl:.1e}"


def step_text(measurement: Measurement) -> str:
    """Return a decode step's median, in milliseconds, and how far the repeats' medians are from their middle."""
    spread = measurement.spread
    if spread is None:
        return NOTHING
    return f"{milliseconds(measurement.step)} ± {(spread[1] - spread[0]) / 2 * 1e3:.1f}"


def prefill_text(measurement: Measurement) -> str:
    """Return the seconds of a prompt for a reader."""
    return NOTHING if measurement.prefill is None else f"{measurement.prefill:.2f}"


def perplexity_text(measurement: Measurement) -> str:
    """Return the perplexity for a reader."""
    return NOTHING if measurement.perplexity is None else f"{measurement.perplexity:.3f}"


def percent(share: float | None) -> str:
    """Return a share for a reader."""
    return NOTHING if share is None else f"{share:.0%}"


def heading(bench: Bench) -> str:
    """Return what was measured, in a sentence."""
    asked, machine = bench.request, bench.machine
    attention = (
        "" if asked.kvrack_attention == asked.attention else f", attention {asked.kvrack_attention} for kvrack's"
    )
    rows = "" if asked.batch == 1 else f", {asked.batch} rows"
    return (
        f"{asked.model}, {asked.dtype}{rows}{attention}, on {machine.device}: {machine.processor}, {machine.threads} "
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
    rows = table("cache", "of", "prefill s", "step ms", "floor", "stored", "peak", "KL", "perplexity")
    if moving:
        rows.add_column("moved a step")
    before = ""
    for each in ordered(context):
        cells = [
            "" if each.cache == before else each.cache,
            f"{each.side}{' (dense)' if each is context.reference else ''}",
            prefill_text(each),
            step_text(each),
            percent(each.share),
            size(each.stored_bytes),
            size(each.peak_bytes),
            divergence(each),
            perplexity_text(each),
        ]
        rows.add_row(*cells, *([size(each.moved_in)] if moving else []))
        before = each.cache
    return rows


def ordered(context: Context) -> list[Measurement]:
    """Return the measurements for a reader: each of kvrack's, and transformers' after the one of its kind."""
    found: list[Measurement] = []
    for ours, other in context.pairs():
        found += [ours] if other is None or other in found else [ours, other]
    return [*(each for each in context.measurements if each not in found), *found]


def ratios_of(ours: Measurement, other: Measurement) -> list[str]:
    """Return how kvrack's cache compares with transformers' of its kind: prefill, decode, stored, peak, KL."""
    return [
        times(ours.prefill, other.prefill),
        times(ours.step, other.step),
        part(ours.stored_bytes, other.stored_bytes),
        part(ours.peak_bytes, other.peak_bytes),
        f"{divergence(ours)} / {divergence(other)}",
    ]


RATIOS = ("prefill speed", "decode speed", "stored", "peak", "KL")


def _ratios(context: Context) -> Table:
    rows = table("kvrack / transformers", *RATIOS)
    for ours, other in context.pairs():
        if other is not None:
            rows.add_row(ours.cache, *ratios_of(ours, other))
    return rows
