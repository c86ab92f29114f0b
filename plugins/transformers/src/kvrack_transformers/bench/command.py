"""``kvrack bench``: the command. Importing it imports neither torch nor transformers nor matplotlib."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from kvrack import KvrackError
from kvrack.commands import output
from kvrack_transformers.bench.entries import ALL, FIRST, parse_caches
from kvrack_transformers.models import CACHE_VARIABLE, find_model, load_model
from kvrack_transformers.running import DTYPES, activity, device_named, device_option, model_option, own_warnings_only

if TYPE_CHECKING:
    import torch

    from kvrack_transformers.bench.measure import Advance
    from kvrack_transformers.bench.results import Bench
    from kvrack_transformers.bench.run import Work

WIDTH = 132
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C ended."""


class Contexts(click.ParamType):  # type: ignore[type-arg]
    """Numbers of tokens, such as 512,2048,4096."""

    name = "tokens"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            found = ()
        if not found or min(found) < 1:
            self.fail(f"{value!r} is no list of numbers of tokens; expected one such as 512,2048,4096", param, ctx)
        return tuple(dict.fromkeys(sorted(found)))


@click.command("bench", epilog=f"Converted models are kept in the user's cache directory, or in ${CACHE_VARIABLE}.")
@model_option
@click.option(
    "--cache", "caches", multiple=True, metavar="NAME[:KEY=VALUE,...]", default=(FIRST,), show_default=True,
    help=f"Backend to measure, with its settings; repeatable, '{ALL}' for every installed one.",
)  # fmt: skip
@click.option(
    "--context", "contexts", type=Contexts(), default="512,2048,4096", show_default=True, metavar="N,...",
    help="Tokens of the prompts.",
)  # fmt: skip
@click.option(
    "--new-tokens", type=click.IntRange(min=1), default=32, show_default=True, metavar="N",
    help="Tokens that each repeat decodes.",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(min=1), default=3, show_default=True, metavar="N",
    help="Timed repeats, after one that warms up and watches memory.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Rows of text.")
@click.option(
    "--against", type=click.Choice(["transformers"]), help="Measure its own caches of the same kinds too, in turn."
)
@click.option(
    "--attention", type=click.Choice(["model", "kvrack"]), default="model", show_default=True,
    help="Attention that reads kvrack's caches: the model's own, or the implementation that kt.enable() adds.",
)  # fmt: skip
@click.option(
    "--text", "text_file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
    help="Real text to read; by default the manual that comes with Python.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default="kvrack-bench", show_default=True, metavar="DIR",
    help="Folder for bench.json, bench.html and the plots.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights, keys and values; the model's own by default.")
@click.option("--threads", type=click.IntRange(min=1), metavar="N", help="Of torch; its own choice by default.")
@device_option
@click.option(
    "--compare", nargs=2, type=click.Path(path_type=Path), metavar="A.json B.json",
    help="Measure nothing: print how two results differ.",
)  # fmt: skip
@click.pass_context
def bench(
    ctx: click.Context,
    model: str,
    caches: tuple[str, ...],
    contexts: tuple[int, ...],
    new_tokens: int,
    repeats: int,
    batch: int,
    against: str | None,
    attention: str,
    text_file: Path | None,
    out: Path,
    dtype: str | None,
    threads: int | None,
    device: str | None,
    compare: tuple[Path, Path] | None,
) -> None:
    """Measure speed, memory and quality of caches side by side, on one model and on real text.

    Prints tables, and writes bench.json, bench.html and plots to --out. Ctrl-C keeps what is done.
    """
    if compare is not None:
        from kvrack_transformers.bench.compare import render_comparison
        from kvrack_transformers.bench.results import read

        first, second = (read(path) for path in compare)
        render_comparison(first, second, compare, _wide_output())
        return
    _check_extra()
    from kvrack_transformers.bench.text import read_text

    asked, left_out = parse_caches(caches)
    source = find_model(model)
    text, text_name = read_text(text_file)
    _check_folder(out)
    with activity("Starting"):
        import torch

        from kvrack_transformers.bench.run import Work

        target = device_named(device)
    if threads is not None:
        torch.set_num_threads(threads)
    work = Work(
        model, asked, contexts, new_tokens, repeats, batch, against is not None, text_name, left_out,
        None if attention == "model" else attention,
    )  # fmt: skip
    with own_warnings_only(), _enabled():
        result = _measure(work, source, target, text, dtype)
    _write(result, out)
    if result.interrupted:
        ctx.exit(INTERRUPTED)


def _check_extra() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise KvrackError(
            "bench needs matplotlib, which is not installed. Run: pip install 'kvrack-transformers[bench]'"
        )


def _check_folder(out: Path) -> None:
    """Make the folder now, so that no measurement is lost to one that can't be made."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / ".writable").touch()
        (out / ".writable").unlink()
    except OSError as error:
        raise KvrackError(f"--out: {out} can't be written: {error.strerror or error}") from error


def _measure(work: Work, source: Any, device: torch.device, text: str, dtype: str | None) -> Bench:
    import torch

    from kvrack_transformers.bench.run import check_room, entries_of, run_all
    from kvrack_transformers.bench.text import tokens_of
    from kvrack_transformers.models import quiet

    loaded = load_model(source, device, activity)
    model: Any = loaded.model
    if model.config.is_encoder_decoder:
        raise KvrackError(f"bench measures models that are decoders alone, and {work.model_name} has an encoder")
    if dtype is not None:
        model = model.to(getattr(torch, dtype))
    plans = work.plans
    check_room(model, plans)
    longest = max(plan.length for plan in plans)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    with quiet():
        tokens = tokens_of(loaded.tokenizer, text, work.text_name, work.batch, longest, vocabulary)
        count = len(entries_of(work, device)[0])
        with progress(sum(plan.cost(count) for plan in plans)) as advance:
            return run_all(model, tokens, work, advance)


@contextlib.contextmanager
def _enabled() -> Iterator[None]:
    """Have what kvrack adds to transformers for as long as it lasts."""
    import kvrack_transformers as kt

    kt.enable()
    try:
        yield
    finally:
        kt.disable()


@contextlib.contextmanager
def progress(total: int) -> Iterator[Advance]:
    """Show on stderr how far it is and the time left; plain lines where that is no terminal."""
    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        told: set[str] = set()

        def tell(what: str, cost: int) -> None:
            if what not in told:
                told.add(what)
                click.echo(what, err=True)

        yield tell
        return
    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn(),
        TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("Starting", total=total)

        def advance(what: str, cost: int) -> None:
            bar.update(task, advance=cost, description=what)

        yield advance


def _write(result: Bench, out: Path) -> None:
    """Write what was found, print it, and say where it is."""
    from kvrack_transformers.bench.results import write
    from kvrack_transformers.bench.table import render

    write(result, out / "bench.json")
    render(result, _wide_output())
    written = ["bench.json", *_draw(result, out)]
    click.echo(f"\nWritten to {out}: {', '.join(written)}")


def _draw(result: Bench, out: Path) -> list[str]:
    """Write the page and the plots, and return their names."""
    from kvrack_transformers.bench.page import page
    from kvrack_transformers.bench.plots import PLOTS, figures, png

    drawn = figures(result)
    for name, figure in drawn.items():
        (out / f"{name}.png").write_bytes(png(figure))
    (out / "bench.html").write_text(page(result, drawn), encoding="utf-8")
    return ["bench.html", *(f"{name}.png" for name in PLOTS if name in drawn)]


def _wide_output() -> Console:
    """Return a console whose tables stay whole in a file or a pipe."""
    console = output()
    if not console.is_terminal:
        console.width = WIDTH
    return console
