"""``kvrack generate``: a real model answers a prompt through one cache backend, or through several in turn."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

import kvrack
from kvrack.commands import output, settings_option, table
from kvrack_transformers.models import CACHE_VARIABLE, find_model, load_model
from kvrack_transformers.running import (
    activity,
    device_named,
    device_option,
    max_new_tokens_option,
    model_option,
    own_warnings_only,
    seed_option,
    seed_or_any,
    temperature_option,
)

if TYPE_CHECKING:
    import torch

    from kvrack_transformers.models import LoadedModel

ALL = "all"
REFERENCE = "dynamic"
"""The backend that answers first under ``--cache all``, and that the others' answers are compared with."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        max_new_tokens: the longest answer.
        temperature: 0 for the likeliest token each time.
        seed: of the random numbers, the same for every cache.
    """

    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Answer:
    """What one cache's answer was and took.

    Attributes:
        cache: name of the backend.
        prompt_tokens: tokens the model was given.
        tokens: the new ones, an end-of-text token included.
        rate: new tokens a second, the first not counted, since it waits for the whole prompt; None with
            fewer than two.
        nbytes: bytes the cache held at the end.
    """

    cache: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    rate: float | None
    nbytes: int

    @property
    def rate_text(self) -> str:
        """The rate for a reader."""
        return f"{self.rate:.1f}" if self.rate is not None else "-"

    @property
    def nbytes_text(self) -> str:
        """The bytes for a reader, rounded and exact."""
        return f"{decimal(self.nbytes)} ({self.nbytes:,} bytes)"


@click.command("generate", epilog=f"Converted models are kept in the user's cache directory, or in ${CACHE_VARIABLE}.")
@click.argument("prompt", required=False)
@click.option(
    "--cache",
    "caches",
    multiple=True,
    metavar="NAME",
    default=(REFERENCE,),
    show_default=True,
    help=f"Backend to answer through; repeatable, '{ALL}' for every installed one. Several are compared at the end.",
)
@settings_option
@model_option
@max_new_tokens_option
@temperature_option
@seed_option
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Read the prompt from this file.",
)
@device_option
def generate(
    prompt: str | None,
    caches: tuple[str, ...],
    settings: dict[str, object],
    model: str,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
    prompt_file: Path | None,
    device: str | None,
) -> None:
    """Answer PROMPT with a language model whose KV cache is the backend NAME.

    The answer appears as it is made, then its tokens, tokens a second after the first, and the bytes the
    cache holds. Without PROMPT, it is read from --prompt-file or from standard input.
    """
    text = _prompt(prompt, prompt_file)
    source = find_model(model)
    with activity("Starting"):
        names, left_out = _names(caches, settings)
        target = device_named(device)
    loaded = load_model(source, target, activity)
    inputs = _tokens(loaded, text)
    sampling = Sampling(_room(loaded, inputs, max_new_tokens), temperature, seed_or_any(seed))

    comparing = ALL in caches or len(names) > 1
    answers: list[Answer] = []
    for name in names:
        if comparing:
            click.secho(f"{name}:", bold=True)
        try:
            answers.append(_answer(loaded, inputs, name, settings, sampling))
        except kvrack.KvrackError as error:
            if ALL not in caches:
                raise
            click.echo(f"not run: {error}\n")
            left_out[name] = str(error)
            continue
        _report(answers[-1])
        if comparing:
            click.echo()
    if not answers:
        raise kvrack.KvrackError(f"no installed backend could answer: {'; '.join(left_out.values())}")
    if comparing:
        _compare(answers, left_out)


# --- what was asked for --------------------------------------------------------------------------


def _prompt(given: str | None, file: Path | None) -> str:
    if given is not None and file is not None:
        raise click.UsageError("PROMPT and --prompt-file: give one of them.")
    try:
        if file is not None:
            text = file.read_text(encoding="utf-8")
        elif given is not None:
            text = given
        elif sys.stdin is None or sys.stdin.isatty():
            raise click.UsageError("no prompt: give PROMPT, --prompt-file, or text on standard input.")
        else:
            text = sys.stdin.read()
        # Bytes of an argument that are no UTF-8 come as surrogates, which no tokenizer takes.
        text.encode("utf-8")
    except UnicodeError as error:
        raise click.UsageError(f"the prompt is not UTF-8 text: {error}") from error
    except OSError as error:
        raise click.UsageError(f"the prompt can't be read: {error}") from error
    if not text.strip():
        raise click.UsageError("the prompt is empty.")
    return text


def _names(caches: tuple[str, ...], settings: Mapping[str, object]) -> tuple[list[str], dict[str, str]]:
    """Return the backends to use, names and settings checked, and those of `all` that can't be, with the reason."""
    if ALL not in caches:
        for name in caches:
            kvrack.resolve(name, settings)
        return list(caches), {}
    usable: list[str] = []
    left_out: dict[str, str] = {}
    for name in sorted(kvrack.backends(), key=lambda each: (each != REFERENCE, each)):
        try:
            kvrack.resolve(name, settings)
            usable.append(name)
        except kvrack.KvrackError as error:
            left_out[name] = str(error)
    if not usable:
        reasons = "; ".join(left_out.values()) or "none is installed. Run: pip install kvrack-dynamic"
        raise kvrack.KvrackError(f"no installed cache backend can be used: {reasons}")
    return usable, left_out


def _tokens(loaded: LoadedModel, text: str) -> dict[str, torch.Tensor]:
    """Return the prompt as the model takes it, in the model's chat template where it has one."""
    tokenizer: Any = loaded.tokenizer
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": text}]
        encoded = tokenizer.apply_chat_template(
            message, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(text, return_tensors="pt")
    return {key: encoded[key].to(loaded.model.device) for key in ("input_ids", "attention_mask")}


def _room(loaded: LoadedModel, inputs: Mapping[str, torch.Tensor], asked: int) -> int:
    """Return how many new tokens the model has positions for, at most `asked`."""
    if loaded.model.config.is_encoder_decoder:
        return asked
    from kvrack_transformers.reading import room_for_answer

    return room_for_answer(loaded.model, inputs["input_ids"].shape[1], asked)


# --- the answer ----------------------------------------------------------------------------------


def _answer(
    loaded: LoadedModel,
    inputs: Mapping[str, torch.Tensor],
    name: str,
    settings: Mapping[str, object],
    sampling: Sampling,
) -> Answer:
    import torch

    import kvrack_transformers as kt
    from kvrack_transformers.models import quiet
    from kvrack_transformers.streaming import Streamer
    from kvrack_transformers.versions import CACHE_ARGUMENT

    kt.enable()
    streamer = Streamer(loaded.tokenizer)
    chosen = {"do_sample": True, "temperature": sampling.temperature} if sampling.temperature else {"do_sample": False}
    model: Any = loaded.model
    torch.manual_seed(sampling.seed)
    try:
        with quiet(), own_warnings_only():
            result = model.generate(
                **inputs,
                cache_implementation=name,
                cache_config=dict(settings) or None,
                max_new_tokens=sampling.max_new_tokens,
                num_beams=1,
                return_dict_in_generate=True,
                streamer=streamer,
                **chosen,
            )
    except torch.OutOfMemoryError as error:
        raise kvrack.KvrackError(
            f"{name}: no memory left on {model.device}. Try another --cache, a shorter prompt or --device cpu"
        ) from error
    new = result.sequences.shape[1] - streamer.prompt_tokens
    return Answer(
        cache=name,
        prompt_tokens=inputs["input_ids"].shape[1],
        tokens=tuple(result.sequences[0, -new:].tolist()),
        rate=streamer.rate,
        nbytes=getattr(result, CACHE_ARGUMENT).nbytes,
    )


def _report(answer: Answer) -> None:
    click.echo(
        f"{answer.cache}: {answer.prompt_tokens} + {len(answer.tokens)} tokens, {answer.rate_text} tokens/s, "
        f"the cache holds {answer.nbytes_text}"
    )


def _compare(answers: list[Answer], left_out: Mapping[str, str]) -> None:
    """Print the closing table: each cache's figures and whether its answer is the first one's."""
    console = output()
    first = answers[0]
    rows = table("name", "tokens", "tokens/s", "bytes held", "answer")
    for answer in answers:
        same = "the first" if answer is first else _difference(first.tokens, answer.tokens)
        rows.add_row(answer.cache, str(len(answer.tokens)), answer.rate_text, answer.nbytes_text, same)
    for name in left_out:
        rows.add_row(name, "-", "-", "-", "not run")
    console.print(rows)
    for name, reason in left_out.items():
        console.print(f"\n{name} was not run: {reason}", soft_wrap=True)


def _difference(first: tuple[int, ...], other: tuple[int, ...]) -> str:
    if first == other:
        return "same"
    shared = next(
        (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), min(len(first), len(other))
    )
    return f"differs from token {shared + 1} on"
