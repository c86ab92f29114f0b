"""``kvrack plan``: how many bytes each cache would hold for a model, read from its config alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

import kvrack
from kvrack.commands import output, print_json, settings_option, table
from kvrack_transformers.models import DEFAULT_MODEL, ModelError, converted_folder, find_model
from kvrack_transformers.running import own_warnings_only

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
UNBOUNDED = 1 << 24
"""Tokens beyond which no longest context is looked for."""


@dataclass(frozen=True)
class Plan:
    """What one backend would hold.

    Attributes:
        cache: its name.
        nbytes: all bytes of keys and values, codes and scratch, wherever they are.
        resident: those in the model's own memory, what an offloading backend holds elsewhere not counted.
        fits: whether weights and resident bytes fit; None where no memory was given.
        longest: the longest context that fits, at most what the model was made for; None likewise.
        lossless: whether answers stay those of a plain cache.
        constructed: whether the whole cache was built; else it was carried on from small ones.
    """

    cache: str
    nbytes: int
    resident: int
    fits: bool | None
    longest: int | None
    lossless: bool
    constructed: bool


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 8GiB, 500MB or 1000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = SIZE.fullmatch(value.strip())
        if found is None:
            self.fail(f"{value!r} is no number of bytes; expected one such as 8GiB, 500MB or 1000", param, ctx)
        return int(float(found[1]) * UNITS[(found[2] or "").lower()])


@click.command("plan")
@click.option(
    "--model", default=DEFAULT_MODEL, show_default=True, metavar="M",
    help="A folder, a hub id, a config.json, or a .gguf file that was converted before. Weights aren't read.",
)  # fmt: skip
@click.option("--context", type=click.IntRange(min=1), default=4096, show_default=True, help="Prompt and answer.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights, keys and values; the config's by default.")
@click.option("--memory", type=Size(), help="Memory there is for weights and cache together, such as 8GiB.")
@settings_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plan(
    model: str,
    context: int,
    batch: int,
    dtype: str | None,
    memory: int | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Predict the bytes of every installed cache for a model, from its config alone."""
    import torch

    from kvrack_transformers.reading import model_spec

    config = _config(model)
    spec = model_spec(config)
    found = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    chosen: torch.dtype = getattr(torch, found)
    weights = _weights(config, chosen)
    room = None if memory is None else memory - (weights or 0)
    plans: list[Plan] = []
    refused: dict[str, str] = {}
    unknown: tuple[int, ...] = ()
    with own_warnings_only():
        for name in sorted(kvrack.backends()):
            try:
                predicted = kvrack.predict_memory(name, spec, context, batch, chosen, **settings)
                plans.append(_plan(name, predicted, spec, context, batch, chosen, settings, room))
                unknown = predicted.unknown
            except (kvrack.KvrackError, OSError, RuntimeError) as error:
                refused[name] = " ".join(str(error).split())
    if not plans:
        raise kvrack.KvrackError(f"no installed backend can be planned: {'; '.join(refused.values()) or 'none'}")
    best, reason = _recommend(plans, memory)
    if as_json:
        print_json({
            "model": model, "context": context, "batch": batch, "dtype": found, "weights": weights, "memory": memory,
            "plans": [asdict(each) for each in plans], "recommendation": best, "reason": reason, "refused": refused,
            "unknown_layers": list(unknown),
        })  # fmt: skip
        return
    console = output()
    held = "unknown" if weights is None else decimal(weights)
    console.print(f"{spec.name}, {context} tokens, batch {batch}, {found}; weights {held}", soft_wrap=True)
    rows = table("cache", "bytes", "resident", "fits", "longest context", "answers")
    for each in sorted(plans, key=lambda one: one.resident):
        fits = "-" if each.fits is None else "yes" if each.fits else "no"
        longest = "-" if each.longest is None else f"{each.longest:,}"
        answers = "exact" if each.lossless else "approximate"
        rows.add_row(each.cache, decimal(each.nbytes), decimal(each.resident), fits, longest, answers)
    console.print(rows)
    if spec.max_length is not None and context > spec.max_length:
        console.print(f"The model was made for {spec.max_length:,} tokens, fewer than --context.", soft_wrap=True)
    if unknown:
        console.print(
            f"Not counted: {len(unknown)} layers whose states or head_dim the config doesn't say "
            f"(the first is {unknown[0]}).", soft_wrap=True,
        )  # fmt: skip
    for name, text in refused.items():
        console.print(f"{name} can't be planned: {text}", soft_wrap=True)
    console.print(f"{'Take ' + best if best else 'None of them'}: {reason}", soft_wrap=True)


def _config(model: str) -> Any:
    from transformers import AutoConfig

    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".json":
        place = str(path)
    else:
        source = find_model(model)
        place = source.place
        if source.kind == "gguf":
            place = str(converted_folder(Path(source.place)))
            if not Path(place).is_dir():
                raise ModelError(model, f"it wasn't converted yet. Run: kvrack generate --model {model} Hello")
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelError(model, f"its config can't be read: {next(iter(str(error).splitlines()), '')}") from error


def _weights(config: Any, dtype: torch.dtype) -> int | None:
    """Return the bytes of the model's weights, built on the meta device; None where transformers can't build it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind: Any = AutoModelForSeq2SeqLM if getattr(config, "is_encoder_decoder", False) else AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = kind.from_config(config, trust_remote_code=False)
        model.tie_weights()
    except Exception:
        # Any class of model may raise anything; what is not known is said so.
        return None
    numbers: int = sum(parameter.numel() for parameter in model.parameters())
    return numbers * dtype.itemsize


def _plan(
    name: str,
    predicted: kvrack.Prediction,
    spec: kvrack.ModelSpec,
    context: int,
    batch: int,
    dtype: torch.dtype,
    settings: dict[str, Any],
    room: int | None,
) -> Plan:
    def resident_with(tokens: int) -> int:
        return kvrack.predict_memory(name, spec, tokens, batch, dtype, **settings).resident

    resident = predicted.resident
    lossless = kvrack.create_cache(name, spec, context, **settings).capabilities.lossless
    fits = longest = None
    if room is not None:
        fits = resident <= room
        longest = _longest(resident_with, room, spec.max_length)
    return Plan(name, predicted.nbytes, resident, fits, longest, lossless, predicted.is_constructed)


def _longest(resident: Callable[[int], int], room: int, most: int | None) -> int:
    """Return the largest number of tokens, up to `most`, that take at most `room` bytes."""
    low, high = 0, most or UNBOUNDED
    if resident(high) <= room:
        return high
    # What is wanted to three digits; a token more or less is decided by what else uses the memory.
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if resident(middle) <= room else (low, middle)
    return low


def _recommend(plans: list[Plan], memory: int | None) -> tuple[str | None, str]:
    """Return the backend to take and why: exact before approximate, wholly resident before offloaded."""
    fitting = [each for each in plans if each.fits is not False]
    if not fitting:
        least = min(plans, key=lambda each: each.resident)
        return None, f"even {least.cache} needs {decimal(least.resident)} beside the weights; its longest context is " \
                     f"{least.longest:,} tokens"  # fmt: skip

    def order(each: Plan) -> tuple[bool, bool, bool, int]:
        return not each.lossless, each.resident < each.nbytes, each.cache != "dynamic", each.resident

    best = min(fitting, key=order)
    where = "all of it stays resident" if best.resident == best.nbytes else "part of it is held elsewhere"
    kind = "its answers are exact" if best.lossless else "no exact cache fits"
    return best.cache, f"{kind}, {where}" + (
        "" if memory is None else f", and it fits {decimal(memory)} with the weights"
    )
