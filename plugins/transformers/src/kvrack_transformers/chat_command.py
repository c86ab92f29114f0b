"""``kvrack chat``: a conversation with a real model, over one cache that is kept from turn to turn."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
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
    from kvrack_transformers.chat import Chat

PROMPT = "> "


@click.command("chat", epilog=f"Converted models are kept in the user's cache directory, or in ${CACHE_VARIABLE}.")
@click.option("--cache", default="dynamic", show_default=True, metavar="NAME", help="Backend to keep the talk in.")
@settings_option
@model_option
@click.option("--system", metavar="TEXT", help="The system message; the chat template's own by default.")
@click.option(
    "--load",
    "saved",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Go on with a conversation that /save wrote.",
)
@max_new_tokens_option
@temperature_option
@seed_option
@device_option
def chat(
    cache: str,
    settings: dict[str, object],
    model: str,
    system: str | None,
    saved: Path | None,
    max_new_tokens: int,
    temperature: float,
    seed: int | None,
    device: str | None,
) -> None:
    """Talk with a language model whose KV cache is the backend NAME and is kept over the turns.

    A line is a message; /help lists what else there is. Lines can come from a pipe. After each answer
    it is told how many tokens of the conversation the cache knew and how many were fed.
    """
    source = find_model(model)
    with activity("Starting"):
        kvrack.resolve(cache, settings)
        target = device_named(device)
    loaded = load_model(source, target, activity)
    import torch

    from kvrack_transformers.chat import Chat

    try:
        talk = Chat(loaded.model, loaded.tokenizer, cache, settings, system=system, max_new_tokens=max_new_tokens)
    except ValueError as error:
        if isinstance(error, kvrack.KvrackError):
            raise
        raise kvrack.KvrackError(f"model {model!r} can't be talked with: {error}") from error
    if saved is not None:
        talk.load(saved)
    torch.manual_seed(seed_or_any(seed))
    chosen = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    for line in _lines():
        if not (said := line.strip()):
            continue
        if said.startswith("/"):
            name, _, argument = said[1:].partition(" ")
            if name in ("quit", "exit"):
                break
            _try(partial(_command, talk, name, argument.strip()))
        else:
            _try(partial(_answer, talk, said, chosen))


def _lines() -> Iterator[str]:
    """Yield what is typed or piped in, to its end."""
    while True:
        try:
            yield input(PROMPT) if sys.stdin.isatty() else _next_piped()
        except EOFError:
            return
        except KeyboardInterrupt:
            # At the prompt, as at a shell's.
            click.echo()
            return


def _next_piped() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


def _try(action: Callable[[], None]) -> None:
    """Do it, and say in a line why it couldn't be done; the conversation goes on."""
    try:
        action()
    except (kvrack.KvrackError, OSError, ValueError) as error:
        click.echo(f"not done: {error}", err=True)
    except KeyboardInterrupt:
        click.echo("\ninterrupted: the message is taken back", err=True)


def _answer(talk: Chat, text: str, chosen: dict[str, Any]) -> None:
    import torch

    from kvrack_transformers.models import quiet
    from kvrack_transformers.streaming import Streamer

    streamer = Streamer(talk.tokenizer)
    try:
        with quiet(), own_warnings_only():
            talk.send(text, streamer, **chosen)
    except torch.OutOfMemoryError as error:
        raise kvrack.KvrackError(
            f"no memory left on {talk.model.device}. Try /undo, another --cache or --device cpu"
        ) from error
    turn = talk.turn
    assert turn is not None
    went = f", {turn.rolled_back} gone back" if turn.rolled_back else ""
    rate = f"{streamer.rate:.1f}" if streamer.rate is not None else "-"
    click.secho(
        f"[{turn.known} tokens known{went}, {turn.fed} fed, {turn.new} new, {rate} tokens/s, "
        f"the cache holds {decimal(talk.cache.nbytes)}]",
        dim=True,
    )


# --- commands ------------------------------------------------------------------------------------


def _command(talk: Chat, name: str, argument: str) -> None:
    if name not in COMMANDS:
        raise kvrack.KvrackError(f"no command /{name}. There are: {', '.join(f'/{each}' for each in COMMANDS)}, /quit")
    COMMANDS[name][1](talk, argument)


def _save(talk: Chat, argument: str) -> None:
    path = _path(argument, "save")
    talk.save(path)
    click.echo(f"saved {len(talk.token_ids)} tokens to {path}")


def _load(talk: Chat, argument: str) -> None:
    path = _path(argument, "load")
    talk.load(path)
    click.echo(f"loaded {len(talk.messages)} messages, {len(talk.token_ids)} tokens from {path}")


def _path(argument: str, name: str) -> Path:
    if not argument:
        raise kvrack.KvrackError(f"/{name}: expected a file, as in /{name} talk.kv")
    return Path(argument).expanduser()


def _undo(talk: Chat, argument: str) -> None:
    done = talk.undo()
    click.echo(f"taken back; {len(talk.messages)} messages are left" if done else "there is nothing to take back")


def _memory(talk: Chat, argument: str) -> None:
    sizes: Counter[tuple[str, str]] = Counter()
    for row in talk.cache.memory():
        sizes[row.role, row.device] += row.nbytes
    rows = table("role", "device", "bytes")
    for (role, device), nbytes in sizes.items():
        rows.add_row(role, device, f"{nbytes:,}")
    rows.add_row("all", "", f"{talk.cache.nbytes:,}")
    output().print(rows)
    click.echo(f"{talk.cache.get_seq_length()} tokens seen, {len(talk.messages)} messages")


def _help(talk: Chat, argument: str) -> None:
    rows = table("command", "what it does")
    for name, (meaning, _) in COMMANDS.items():
        rows.add_row(f"/{name}", meaning)
    rows.add_row("/quit", "end; so does the end of input")
    output().print(rows)


COMMANDS: dict[str, tuple[str, Callable[[Chat, str], None]]] = {
    "save": ("FILE: write the conversation and its cache", _save),
    "load": ("FILE: go on with one that was saved with this model", _load),
    "undo": ("take the last message and its answer back", _undo),
    "memory": ("what the cache holds, by role and device", _memory),
    "help": ("this list", _help),
}
