"""``kvrack plan``: how many bytes each cache would hold for a model, read from its config alone."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.filesize import decimal

import kvrack
from kvrack.commands import output, print_json, settings_option, table
from kvrack.errors import closest
from kvrack_transformers.models import (
    DEFAULT_MODEL,
    NOT_FOUND_OFFLINE,
    ModelError,
    ModelSource,
    converted_folder,
    find_model,
    hub_answers,
    quiet,
)
from kvrack_transformers.running import DTYPES

if TYPE_CHECKING:
    import torch

    from kvrack_transformers.planning import Need, Plan, Plans

VERSION = 1
"""Of what ``--json`` prints; raised when a name in it goes or comes to mean something else."""

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, such as 8GiB, 500MB or 1000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = SIZE.fullmatch(value.strip())
        size = int(float(found[1]) * UNITS[(found[2] or "").lower()]) if found else 0
        if size < 1:
            self.fail(f"{value!r} is no number of bytes above 0; expected one such as 8GiB, 500MB or 1000", param, ctx)
        return size


@click.command("plan")
@click.option(
    "--model", default=DEFAULT_MODEL, show_default=True, metavar="M",
    help="A folder, a hub id, a config.json, or a .gguf file that was converted before. Weights aren't read.",
)  # fmt: skip
@click.option(
    "--context", type=click.IntRange(min=1), default=4096, show_default=True, metavar="N",
    help="Tokens, prompt and answer together.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Rows at once.")
@click.option(
    "--encoder-tokens", type=click.IntRange(min=1), metavar="N",
    help="Length of the encoder's output, for a model that has an encoder. "
    "Default: the length it always has (Whisper), else --context.",
)  # fmt: skip
@click.option("--dtype", type=click.Choice(DTYPES), help="Of weights, keys and values; the config's by default.")
@click.option("--memory", type=Size(), help="Memory there is for weights and cache together, such as 8GiB.")
@settings_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, which kvrack-transformers' README describes.")
def plan(
    model: str,
    context: int,
    batch: int,
    encoder_tokens: int | None,
    dtype: str | None,
    memory: int | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Predict the bytes of every installed cache for a model, from its config alone.

    Settings go to the backends that have them.
    """
    source = _source(model)
    import torch

    from kvrack_transformers.planning import Need, plan_all, recommend

    with quiet():
        config = _config(source)
        spec = _spec(config, model)
        encoded = _encoder_tokens(config, spec, encoder_tokens, context)
        named, counted = _dtypes(config, dtype)
        chosen: torch.dtype = getattr(torch, counted)
        weights = _weights(config, chosen)
        need = Need(spec, context, batch, chosen, encoded, settings)
        found = plan_all(need, None if memory is None else memory - (weights or 0))
    best, reason = recommend(found.plans, memory, weights)
    if as_json:
        print_json({
            "version": VERSION, "model": model, "model_type": spec.name, "max_length": spec.max_length,
            "context": context, "encoder_tokens": encoded, "batch": batch, "dtype": counted, "weights": weights,
            "memory": memory, "plans": [asdict(each) for each in found.plans], "recommendation": best,
            "reason": reason, "refused": found.refused, "warnings": found.warned,
        })  # fmt: skip
        return
    console = output()
    _print_head(console, model, need, counted, weights, memory)
    _print_table(console, found, need, memory)
    notes = _notes(found, need, config, named, counted)
    if weights is None:
        notes.append(f"Transformers' auto classes know no {spec.name} model that generates text.")
    for line in notes:
        console.print(line, soft_wrap=True)
    console.print(f"\n{'Take ' + best if best else 'None fits'}: {reason}.", soft_wrap=True)


# --- printing ------------------------------------------------------------------------------------


def _print_head(console: Console, model: str, need: Need, dtype: str, weights: int | None, memory: int | None) -> None:
    spec = need.spec
    rows = "" if need.batch == 1 else f", batch {need.batch}"
    encoder = "" if need.encoder_tokens is None else f", encoder output of {need.encoder_tokens:,} tokens"
    console.print(f"{model} ({spec.name}): {need.context:,} tokens{encoder}{rows}, {dtype}", soft_wrap=True)
    held = "of unknown size" if weights is None else decimal(weights)
    console.print(f"weights {held}" + ("" if memory is None else f", memory {decimal(memory)}") + "\n", soft_wrap=True)


def _print_table(console: Console, found: Plans, need: Need, memory: int | None) -> None:
    columns = ["cache", "bytes", "resident", "answers"]
    asked = ["fits", "longest"] if memory is not None else []
    rows = table(*columns, *asked)
    for column in rows.columns[1:3]:
        column.justify = "right"
    if asked:
        rows.columns[-1].justify = "right"
    for each in _shown(found.plans, need):
        cells = [_name(each), decimal(each.nbytes), decimal(each.resident), "exact" if each.lossless else "approximate"]
        if each.longest is not None:
            cells += ["yes" if each.fits else "no", _tokens(each.longest)]
        rows.add_row(*cells)
    console.print(rows)
    console.print()


def _shown(plans: list[Plan], need: Need) -> list[Plan]:
    """Return the plans to list: one where no layer attends, since then all hold the same."""
    if any(layer.attention is not None for layer in need.spec.layers):
        return plans
    return [next((each for each in plans if each.cache == "dynamic"), plans[0])]


def _name(plan: Plan) -> str:
    if set(plan.settings) == {"tier"}:
        return f"{plan.cache} ({plan.settings['tier']})"
    settings = ",".join(f"{key}={value}" for key, value in plan.settings.items())
    return f"{plan.cache}:{settings}" if settings else plan.cache


def _tokens(count: int) -> str:
    from kvrack_transformers.planning import UNBOUNDED

    return "any" if count >= UNBOUNDED else f"{count:,}"


def _notes(found: Plans, need: Need, config: Any, named: str, counted: str) -> list[str]:
    """Return the lines under the table, which say what it leaves out or takes for granted."""
    from kvrack_transformers.planning import OTHER_NAMES

    spec, first = need.spec, found.plans[0]
    notes = []
    for each in found.plans:
        for place, nbytes in each.elsewhere.items():
            notes.append(
                f"{each.cache} keeps {decimal(nbytes)} on {place} and {decimal(each.resident)} resident: "
                "what two layers need at a time, and what isn't moved."
            )
    if len(_shown(found.plans, need)) < len(found.plans):
        notes.append("No layer attends, so that every cache holds the same: states, kept by mamba.")
    elif first.states:
        notes.append(f"{decimal(first.states)} of each are states, whatever the context; mamba keeps them.")
    if spec.is_encoder_decoder:
        notes.append("What the decoder attends to of the encoder's output is counted; encoder-decoder keeps it.")
    absent = [*_idle_companions(spec), *(f"{name} ({what})" for name, what in OTHER_NAMES.items())]
    absent = [each for each in absent if each.split()[0] in kvrack.backends()]
    if absent:
        notes.append(f"Not listed: {', '.join(absent)}.")
    if first.unknown_layers:
        layers = first.unknown_layers
        notes.append(
            f"Not counted: {len(layers)} of {len(spec.layers) + len(spec.cross_layers)} layers, of which the config "
            f"doesn't say what they cache (the first is layer {layers[0]})."
        )
    if spec.max_length is not None and need.context > spec.max_length:
        notes.append(f"The model was made for {spec.max_length:,} tokens, fewer than --context.")
    if named != counted:
        notes.append(f"The config's dtype is {named}, in which nothing is cached; {counted} is counted.")
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method:
        notes.append(f"The weights are quantized ({method}), and take less than what is counted.")
    notes += [f"{name}: {text}." for name, text in found.warned.items()]
    notes += [f"{name} can't be planned: {text}" for name, text in found.refused.items()]
    return notes


def _idle_companions(spec: kvrack.ModelSpec) -> list[str]:
    """Return the companions that have nothing to keep of this model, with what they would."""
    idle = [] if spec.is_encoder_decoder else ["encoder-decoder (no encoder here)"]
    return idle if any(layer.states for layer in spec.layers) else [*idle, "mamba (no states here)"]


# --- the config ----------------------------------------------------------------------------------


def _source(model: str) -> ModelSource:
    """Return where the config is, read once to say what is wrong before the seconds that transformers takes."""
    path = Path(model).expanduser()
    if path.suffix == ".json":
        if not path.is_file():
            raise ModelError(model, "no such file")
        source = ModelSource(model, "folder", str(path))
    else:
        source = find_model(model)
        path = Path(source.place) / "config.json"
    if source.kind != "folder":
        return source
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(model, f"expected JSON in {path}: {_line(error)}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise ModelError(model, f'{path} is not a model\'s config, there is no "model_type" in it')
    return source


def _config(source: ModelSource) -> Any:
    from transformers import AutoConfig

    place = source.place
    if source.kind == "gguf":
        place = str(converted_folder(Path(source.place)))
        if not Path(place).is_dir():
            raise ModelError(source.name, f"it wasn't converted yet. Run: kvrack generate --model {source.name} Hello")
    offline = source.kind != "hub" or not hub_answers(source.name)
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=offline)
    except Exception as error:
        # Configs are checked in as many ways as there are families; the cause is kept.
        if source.kind == "hub" and offline:
            reason = f"{NOT_FOUND_OFFLINE}. Give its folder or its config.json"
        else:
            reason = _unknown_type(place) or f"its config can't be read: {_line(error)}"
        raise ModelError(source.name, reason) from error


def _unknown_type(place: str) -> str | None:
    """Return what is wrong where transformers knows no model of the type that a config names, else None."""
    import transformers
    from transformers import CONFIG_MAPPING, PretrainedConfig

    found = PretrainedConfig.get_config_dict(place, local_files_only=True)[0]
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return None
    match = closest(kind, CONFIG_MAPPING)
    meant = f" Did you mean {match!r}?" if match else ""
    own = "code of its own, which kvrack plan doesn't run, or " if "auto_map" in found else ""
    return f"transformers {transformers.__version__} knows no model type {kind!r}; it may need {own}a newer one.{meant}"


def _spec(config: Any, model: str) -> kvrack.ModelSpec:
    from kvrack_transformers.reading import model_spec

    try:
        return model_spec(config)
    except kvrack.KvrackError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        reason = f"what a {config.model_type} model caches can't be read from its config: {_line(error)}"
        raise ModelError(model, reason) from error


def _encoder_tokens(config: Any, spec: kvrack.ModelSpec, asked: int | None, context: int) -> int | None:
    if not spec.is_encoder_decoder:
        if asked is not None:
            raise click.BadParameter(f"a {config.model_type} model has no encoder", param_hint="'--encoder-tokens'")
        return None
    fixed = getattr(config, "max_source_positions", None)
    return asked or (fixed if isinstance(fixed, int) else context)


def _dtypes(config: Any, asked: str | None) -> tuple[str, str]:
    """Return the dtype asked for or named by the config, and the one to count in."""
    if asked is not None:
        return asked, asked
    text = config.get_text_config(decoder=True)
    found = getattr(config, "dtype", None) or getattr(text, "dtype", None) or "float32"
    name = str(found).removeprefix("torch.")
    return name, name if name in DTYPES else "bfloat16"


def _weights(config: Any, dtype: torch.dtype) -> int | None:
    """Return the bytes of the model's weights, built on the meta device; None where transformers can't build it."""
    import torch
    import transformers

    kinds = ["AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM"]
    if getattr(config, "is_encoder_decoder", False):
        kinds = ["AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", *kinds]
    for kind in kinds:
        try:
            with torch.device("meta"):
                model = getattr(transformers, kind).from_config(config, trust_remote_code=False)
            model.tie_weights()
        except Exception:
            # Any class of model may raise anything; what is not known is said so.
            continue
        numbers: int = sum(math.prod(parameter.shape) for parameter in model.parameters())
        return numbers * dtype.itemsize
    return None


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # Of a config that fails a check, the second line says what was wrong.
    return " ".join(lines[: 1 + lines[0].endswith(":")]).rstrip(".") if lines else type(error).__name__
