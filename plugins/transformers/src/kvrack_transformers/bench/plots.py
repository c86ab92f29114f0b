"""The plots of a benchmark: memory, speed and quality by context, and quality against bytes."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from kvrack_transformers.bench.results import EXACT, Bench, Context, Measurement, Side

PLOTS = ("memory", "speed", "quality", "front")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C564B")
"""Told apart with any kind of colour vision (Okabe and Ito, Color Universal Design, 2008; yellow, which is faint on
white, is replaced)."""
READABLE = {"#E69F00": "#8a5f00", "#56B4E9": "#2a7fb0", "#CC79A7": "#a34a7c"}
"""Darker ones of the same hue, for letters."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
INK, FAINT = "#222222", "#d9d9d9"
STYLE: Any = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "kvrack",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
WIDTH = 5.6
"""Inches. A page shows a plot about as wide as a phone, and its letters as large as the text."""
WIDE = 8
"""How many times the least bytes the most are before an axis is logarithmic."""
OFFSETS = ((9, 0), (-9, 0), (7, 3), (7, -3), (-7, 3), (-7, -3), (0, 8), (0, -8), (7, 14), (7, -14), (-7, 14), (-7, -14))


@dataclass(frozen=True)
class Look:
    """How a cache is drawn: a colour and a shape for each kind; filled for kvrack, hollow and dashed for
    transformers."""

    colour: str
    marker: str
    side: Side

    def of_line(self) -> dict[str, Any]:
        hollow = self.side == "transformers"
        return {
            "color": self.colour,
            "linestyle": (0, (4, 2)) if hollow else "-",
            "linewidth": 1.6,
            "marker": self.marker,
            "markeredgewidth": 1.4,
            "markerfacecolor": "white" if hollow else self.colour,
            "markersize": 9 if hollow else 6,
        }


@contextmanager
def _styled() -> Iterator[None]:
    with matplotlib.rc_context(STYLE):
        yield


def figures(bench: Bench) -> dict[str, Figure]:
    """Return the plots by name, in the order of `PLOTS`; without one for which nothing was measured."""
    looks = looks_of(bench)
    with _styled():
        drawn = {
            "memory": _memory(bench, looks),
            "speed": _speed(bench, looks),
            "quality": _quality(bench, looks),
            "front": _front(bench, looks),
        }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def png(figure: Figure) -> bytes:
    """Return a plot as a PNG file."""
    stream = io.BytesIO()
    with _styled():
        figure.savefig(stream, format="png", dpi=160, metadata={"Software": "kvrack bench"})
    return stream.getvalue()


def svg(figure: Figure) -> bytes:
    """Return a plot as an SVG file that needs no font."""
    stream = io.BytesIO()
    with _styled():
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()


def looks_of(bench: Bench) -> dict[tuple[Side, str], Look]:
    """Return how each cache is drawn; transformers' of a kind as kvrack's of that kind."""
    kinds = list(dict.fromkeys(cache for _, cache in sorted(bench.keys, key=lambda key: key[0] != "kvrack")))
    return {
        (side, cache): Look(
            COLOURS[kinds.index(cache) % len(COLOURS)], MARKERS[kinds.index(cache) % len(MARKERS)], side
        )
        for side, cache in bench.keys
    }


# --- the plots -----------------------------------------------------------------------------------


def _memory(bench: Bench, looks: dict[tuple[Side, str], Look]) -> Figure | None:
    figure = Figure(figsize=(WIDTH, 6.6), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    drawn = _by_context(upper, bench, looks, lambda each: each.stored_bytes)
    drawn |= _by_context(lower, bench, looks, lambda each: each.peak_bytes)
    if not drawn:
        return None
    upper.set_title("Bytes that keep the tokens")
    lower.set_title("Peak bytes of prefill and decoding, without weights")
    for axes in (upper, lower):
        low, high = axes.dataLim.intervaly
        if not _in_bytes(axes.yaxis, low, high):
            axes.set_ylim(bottom=0)
    lower.set_xlabel("tokens of prompt")
    _legend(figure, looks, drawn)
    return figure


def _speed(bench: Bench, looks: dict[tuple[Side, str], Look]) -> Figure | None:
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    drawn = _by_context(axes, bench, looks, lambda each: None if each.step is None else each.step * 1e3)
    if not drawn:
        return None
    floors = [
        (context.tokens, context.reference.floor_seconds * 1e3)
        for context in bench.contexts
        if context.reference is not None and context.reference.floor_seconds is not None
    ]
    if floors:
        axes.plot(*zip(*floors, strict=True), color="#777777", linewidth=1.2, linestyle=":", marker="_", markersize=14)
    axes.set_title("Decode step, median")
    axes.set_ylabel("milliseconds")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens of prompt")
    more = (
        [Line2D([], [], color="#777777", linestyle=":", linewidth=1.2, label="floor of the dense cache")]
        if floors
        else []
    )
    _legend(figure, looks, drawn, more)
    return figure


def _quality(bench: Bench, looks: dict[tuple[Side, str], Look]) -> Figure | None:
    figure = Figure(figsize=(WIDTH, 4.8), layout="constrained")
    axes = figure.subplots()
    drawn = _by_context(axes, bench, looks, lambda each: None if each.is_exact else each.kl)
    exact = [
        key for key in looks if key not in drawn and any(_is_exact(context.find(key)) for context in bench.contexts)
    ]
    if not drawn and not exact:
        return None
    if drawn:
        axes.set_yscale("log")
    else:
        axes.set_yticks([])
    axes.set_title("Divergence from the dense cache; lower is better")
    axes.set_ylabel("mean KL, nats")
    axes.set_xlabel("tokens of prompt")
    if exact:
        names = ", ".join(_label(key) for key in exact)
        note = "\n".join(textwrap.wrap(f"Exact, and so not drawn: {names}", 62))
        axes.set_xlabel(f"tokens of prompt\n\n{note}")
    _legend(figure, looks, drawn)
    return figure


def _front(bench: Bench, looks: dict[tuple[Side, str], Look]) -> Figure | None:
    if not bench.contexts:
        return None
    context = bench.contexts[-1]
    points = [each for each in context.measurements if each.kl is not None and each.stored_bytes is not None]
    if not points:
        return None
    figure = Figure(figsize=(WIDTH, 5.0), layout="constrained")
    axes = figure.subplots()
    lossy = [each.kl for each in points if not each.is_exact and each.kl is not None]
    lowest = min(lossy, default=1e-3) / 6
    at = {
        each.key: (float(each.stored_bytes or 0), lowest if each.is_exact else float(each.kl or 0)) for each in points
    }
    front = [at[each.key] for each in best_choices(context)]
    axes.plot(*zip(*front, strict=True), color="#bbbbbb", linewidth=5, solid_capstyle="round", alpha=0.6, zorder=1)
    for each in sorted(points, key=lambda one: one.side == "kvrack"):
        axes.plot(*at[each.key], **{**looks[each.key].of_line(), "linestyle": "none"}, zorder=3)
    axes.set_yscale("log")
    axes.set_ylim(lowest / 2.2, max(lossy, default=1e-2) * 2.5)
    axes.yaxis.set_minor_locator(NullLocator())
    ticks = [tick for tick in axes.get_yticks() if tick > lowest * 1.5 and tick < axes.get_ylim()[1]]
    axes.set_yticks([lowest, *ticks], ["exact", *(f"{tick:g}" for tick in ticks)])
    least, most = min(x for x, _ in at.values()), max(x for x, _ in at.values())
    if _in_bytes(axes.xaxis, least, most):
        axes.set_xlim(least / 1.6, most * 1.6)
    else:
        axes.set_xlim(0, most * 1.12)
    axes.set_xlabel(f"bytes that keep {context.held:,} tokens")
    axes.set_ylabel("mean KL from the dense cache, nats")
    axes.set_title(f"Quality against bytes, {context.tokens:,} tokens of prompt")
    grey = Line2D([], [], color="#bbbbbb", linewidth=5, alpha=0.6, label="front of best choices")
    handles = _side_handles({each.side for each in points})
    for handle in handles:
        handle.set_linestyle("none")
    figure.legend(handles=[*handles, grey], loc="outside lower left", ncols=3)
    chosen = {each.key for each in best_choices(context)}
    _place_names(
        figure, axes, [Named(at[each.key], each, each.key in chosen, looks[each.key]) for each in points], front
    )
    return figure


@dataclass(frozen=True)
class Named:
    """A point of the picture of quality against bytes."""

    at: tuple[float, float]
    measurement: Measurement
    is_best: bool
    look: Look


def best_choices(context: Context) -> list[Measurement]:
    """Return the caches that no other beats in both bytes and divergence, by bytes."""
    known = [each for each in context.measurements if each.kl is not None and each.stored_bytes is not None]
    known.sort(key=lambda each: (each.stored_bytes, each.kl, each.side))
    found: list[Measurement] = []
    for each in known:
        assert each.kl is not None
        least = found[-1].kl if found else None
        if least is None or (each.kl < least and not (least < EXACT)):
            found.append(each)
    return found


# --- what they share -----------------------------------------------------------------------------


def _by_context(
    axes: Axes, bench: Bench, looks: dict[tuple[Side, str], Look], value: Callable[[Measurement], float | None]
) -> set[tuple[Side, str]]:
    """Draw a line for each cache, and return those that have a point."""
    drawn = set()
    # Filled on top of hollow, which is larger, so that both are seen where they are the same.
    for key, look in sorted(looks.items(), key=lambda each: each[0][0] == "kvrack"):
        found = [(context.tokens, context.find(key)) for context in bench.contexts]
        points = [(tokens, y) for tokens, each in found if each is not None and (y := value(each)) is not None]
        if points:
            axes.plot(*zip(*points, strict=True), **look.of_line())
            drawn.add(key)
    contexts = [context.tokens for context in bench.contexts]
    axes.set_xticks(contexts, [f"{tokens:,}" for tokens in contexts])
    if len(contexts) == 1:
        axes.set_xlim(contexts[0] * 0.5, contexts[0] * 1.5)
    return drawn


def _is_exact(measurement: Measurement | None) -> bool:
    return measurement is not None and measurement.is_exact


def _label(key: tuple[Side, str]) -> str:
    return key[1] if key[0] == "kvrack" else f"transformers {key[1]}"


def _in_bytes(axis: Any, low: float, high: float) -> bool:
    """Label an axis with bytes; make it logarithmic, and return True, where its ends are far apart: room for many
    tokens to come would press everything else flat."""
    wide = 0 < low * WIDE < high
    if wide:
        (axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale)("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 500 else (1,)))
        axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _short_size(value)))
    return wide


def _short_size(value: float) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= unit:
            return f"{value / unit:g} {name}"
    return f"{value:g}"


def _side_handles(sides: set[Side]) -> list[Line2D]:
    return [
        Line2D([], [], **Look("#555555", "o", side).of_line(), label=side)
        for side in ("kvrack", "transformers")
        if side in sides
    ]


def _legend(
    figure: Figure, looks: dict[tuple[Side, str], Look], drawn: set[tuple[Side, str]], more: list[Line2D] | None = None
) -> None:
    """Name each kind once, and what filled and hollow mean."""
    kinds: dict[str, Look] = {}
    for (_, cache), look in looks.items():
        if any(key[1] == cache for key in drawn):
            kinds.setdefault(cache, look)
    handles = [
        Line2D([], [], color=look.colour, marker=look.marker, linewidth=1.6, label=cache)
        for cache, look in kinds.items()
    ]
    figure.legend(
        handles=[*handles, *_side_handles({side for side, _ in drawn}), *(more or [])], loc="outside lower left",
        ncols=2 if max(map(len, kinds), default=0) > 14 else 3,
    )  # fmt: skip


def _place_names(figure: Figure, axes: Axes, points: list[Named], line: list[tuple[float, float]]) -> None:
    """Write each name beside its point, where it covers no point, no other name and little of the line; those of one
    place together."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    frame, pixels = axes.get_window_extent(renderer), figure.dpi / 72
    places: list[tuple[Any, list[Named]]] = []
    for point in points:
        dot = axes.transData.transform(point.at)
        for place, group in places:
            if abs(place - dot).max() < 4 * pixels:
                group.append(point)
                break
        else:
            places.append((dot, [point]))
    corners = [axes.transData.transform(point) for point in line]
    along = [start + (end - start) * i / 20 for start, end in itertools.pairwise(corners) for i in range(21)]
    taken: list[Any] = []
    for _, group in sorted(places, key=lambda each: -each[0][0]):
        candidates = []
        for dx, dy in OFFSETS:
            text = axes.annotate(
                "\n".join(each.measurement.label for each in group), group[0].at, xytext=(dx, dy), zorder=4,
                textcoords="offset points", ha="left" if dx > 0 else "right" if dx < 0 else "center",
                va="bottom" if dy > 0 else "top" if dy < 0 else "center", fontsize=8.5, linespacing=1.15,
                color=INK if len(group) > 1 else READABLE.get(group[0].look.colour, group[0].look.colour),
                fontweight="bold" if any(each.is_best for each in group) else "normal",
            )  # fmt: skip
            box = text.get_window_extent(renderer)
            faults = (abs(dx) + abs(dy)) * 0.1 + sum(_overlap(box, other) for other in taken)
            faults += 200.0 * sum(
                box.x0 - 7 * pixels < dot[0] < box.x1 + 7 * pixels
                and box.y0 - 7 * pixels < dot[1] < box.y1 + 7 * pixels
                for dot, others in places
                if others is not group
            )
            faults += 5.0 * sum(box.x0 < x < box.x1 and box.y0 < y < box.y1 for x, y in along)
            faults += 1e4 * (box.x0 < frame.x0 or box.x1 > figure.bbox.x1 or box.y1 > frame.y1 or box.y0 < frame.y0)
            candidates.append((faults, text, box))
        best = min(candidates, key=lambda each: each[0])
        taken.append(best[2])
        for each in candidates:
            if each is not best:
                each[1].remove()


def _overlap(box: Any, other: Any) -> float:
    width = min(box.x1, other.x1) - max(box.x0, other.x0)
    height = min(box.y1, other.y1) - max(box.y0, other.y0)
    return float(width * height) if width > 0 and height > 0 else 0.0
