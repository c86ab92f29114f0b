"""A benchmark's result as one page of HTML that needs nothing beside itself."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from rich.filesize import decimal

from kvrack_transformers.bench.plots import PLOTS, best_choices, svg
from kvrack_transformers.bench.results import Bench, Context
from kvrack_transformers.bench.table import (
    NOTHING,
    RATIOS,
    context_line,
    divergence,
    ordered,
    percent,
    perplexity_text,
    prefill_text,
    ratios_of,
    size,
    step_text,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS: Mapping[str, str] = {
    "memory": "Bytes held at the end of a run, room for further tokens included, and the most bytes that prefill or "
    "decoding had allocated at once: cache, activations and scratch, without the model's weights.",
    "speed": "Median time of one decode step. The floor is the time in which the memory bandwidth measured here lets a "
    "step read the weights and the dense cache once.",
    "quality": "Mean KL divergence of the next token's distribution from the dense cache's, teacher-forced on a text.",
    "front": "What is given up for what is saved. Nothing measured is better in both than a cache on the grey line.",
}
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: #222; font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto,
  "DejaVu Sans", sans-serif; }
main { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .6rem; }
p, ul, dl { max-width: 46rem; }
.lead { color: #555; margin: 0 0 1rem; }
.notice { background: #fff4e0; border-left: 4px solid #D55E00; padding: .5rem .8rem; max-width: 46rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 2rem;
  align-items: start; }
figure { margin: 0; max-width: 38rem; }
figure img { width: 100%; height: auto; display: block; }
figcaption { color: #555; font-size: .88rem; margin-top: .3rem; }
.scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; margin: .4rem 0 1rem; }
th, td { padding: .3rem .75rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #e6e6e6; }
th { font-weight: 600; border-bottom: 2px solid #bbb; vertical-align: bottom; }
th:first-child, td:first-child, th.text, td.text { text-align: left; }
tr.best td:first-child::after { content: " \\25CF"; color: #009E73; }
.note { color: #555; font-size: .88rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 0; }
dt { color: #555; }
dd { margin: 0; overflow-wrap: anywhere; }
code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: .92em; overflow-wrap: anywhere; }
"""


def page(bench: Bench, drawn: Mapping[str, Figure]) -> str:
    """Return the page.

    Args:
        bench: the result.
        drawn: its plots, as `plots.figures` returns them.
    """
    asked, machine = bench.request, bench.machine
    title = f"kvrack bench: {asked.model}"
    parts = [
        f"<h1>KV caches on {escape(asked.model)}</h1>",
        f'<p class="lead">{asked.parameters / 1e6:,.0f} million parameters in {escape(asked.dtype)}, on '
        f"{escape(machine.processor)} with {machine.threads} thread{'s' if machine.threads != 1 else ''}; "
        f"{escape(bench.created)}</p>",
    ]
    if bench.interrupted:
        parts.append('<p class="notice">Interrupted: this is what was measured until then.</p>')
    plots = "".join(_figure(name, drawn[name]) for name in PLOTS if name in drawn)
    parts.append(f'<div class="plots">{plots}</div>')
    parts += [_context(bench, context) for context in bench.contexts]
    if bench.left_out:
        items = "".join(f"<li><b>{escape(name)}</b>: {escape(text)}</li>" for name, text in bench.left_out.items())
        parts.append(f"<h2>Not measured</h2><ul>{items}</ul>")
    parts += [_methods(bench), _machine(bench)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing is fetched, whatever a cache's name or a text in here looks like.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{STYLE}</style></head>'
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _figure(name: str, figure: Figure) -> str:
    data = base64.b64encode(svg(figure)).decode()
    caption = escape(CAPTIONS[name])
    return (
        f'<figure id="{name}"><img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def _table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]], texts: int = 1) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=text' if i < texts else ''}>{escape(text)}</{tag}>" for i, text in enumerate(row)
        )

    body = "".join(f"<tr{f' class={kind}' if kind else ''}>{cells('td', row)}</tr>" for kind, row in rows)
    return f'<div class="scroll"><table><thead><tr>{cells("th", head)}</tr></thead><tbody>{body}</tbody></table></div>'


def _context(bench: Bench, context: Context) -> str:
    best = best_choices(context)
    moving = any(each.moved_in for each in context.measurements)
    head = [
        "cache", "of", "prefill, s", "decode step, ms", "of floor", "stored", "peak", "KL, nats", "perplexity",
        "same token", *(["moved a step"] if moving else []),
    ]  # fmt: skip
    rows = []
    for each in ordered(context):
        cells = [
            each.cache,
            each.side + (", the dense one" if each is context.reference else ""),
            prefill_text(each), step_text(each), percent(each.share), size(each.stored_bytes), size(each.peak_bytes),
            divergence(each), perplexity_text(each), percent(each.agreement),
            *([size(each.moved_in)] if moving else []),
        ]  # fmt: skip
        rows.append(("best" if each in best else "", cells))
    text = (
        f"<h2>{context.tokens:,} tokens</h2><p>{escape(context_line(bench, context))}. A green dot marks the front "
        f"of best choices.</p>{_table(head, rows, texts=2)}"
    )
    pairs = [(ours, other) for ours, other in context.pairs() if other is not None]
    if bench.request.against and pairs:
        text += "<p>kvrack beside transformers: speeds as a multiple of transformers', bytes as a part of its.</p>"
        text += _table(["cache", *RATIOS], [("", [ours.cache, *ratios_of(ours, other)]) for ours, other in pairs])
    failed = [each for each in context.measurements if each.error is not None]
    if failed:
        items = "".join(f"<li><b>{escape(each.label)}</b>: {escape(each.error or '')}</li>" for each in failed)
        text += f"<p>Failed:</p><ul>{items}</ul>"
    return text


def _methods(bench: Bench) -> str:
    asked = bench.request
    made = dict.fromkeys((each.label, each.made_by) for context in bench.contexts for each in context.measurements)
    rows = [("", [label, call]) for label, call in made]
    return (
        "<h2>How it was measured</h2>"
        f"<p>All caches hold the same {asked.batch} row{'s' if asked.batch != 1 else ''} of {escape(asked.text)} at "
        "once and decode it in turn, step by step, so that drift of the machine reaches all of them: "
        f"{asked.new_tokens} tokens that warm up, and then {asked.repeats} timed "
        f"repeat{'s' if asked.repeats != 1 else ''} of {asked.new_tokens}. A step is the median of all; ± is half of "
        "what lies between the largest and the smallest median of a repeat. Memory is watched in a prefill of its own "
        "and while warming up, where nothing is timed.</p>"
        f"{_table(['cache', 'made by'], rows, texts=2)}"
    )


def _machine(bench: Bench) -> str:
    machine, asked = bench.machine, bench.request
    lines = {
        "Processor": f"{machine.processor}, {machine.cores} logical cores",
        "Memory": decimal(machine.memory) if machine.memory else NOTHING,
        "System": machine.system,
        "Device": machine.device,
        "Threads": str(machine.threads),
        "Attention": asked.attention
        if asked.attention == asked.kvrack_attention
        else f"{asked.attention}; over kvrack's caches {asked.kvrack_attention}",
        "Weights read a step": decimal(asked.weight_bytes),
        "Releases": ", ".join(f"{name} {release}" for name, release in machine.versions.items()),
    }
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines.items())
    return f"<h2>The machine</h2><dl>{items}</dl>"
