"""The group `kvrack`, whose subcommands plugins add, and its own two: `backends` and `show`.

A plugin's command is imported when it is invoked, and for ``kvrack --help``, which prints a line of
each. Whatever a command raises as `KvrackError` or as one of click's own errors ends as one line on
stderr and exit code 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.table import Table

import kvrack as package
from kvrack.errors import InvalidConfig, KvrackError, closest, listed
from kvrack.registry import COMMAND_GROUP, backends, installed, load_command

KNOWN_COMMANDS = {
    "bench": "kvrack-transformers[bench]",
    "chat": "kvrack-transformers[cli]",
    "generate": "kvrack-transformers[cli]",
    "plan": "kvrack-transformers[cli]",
    "conform": "kvrack-spec",
    "new": "kvrack-spec",
}
"""The project's own plugin commands and what to install for each, for error texts."""


class Failure(click.ClickException):
    """Something is wrong: one line on stderr, exit code 2."""

    exit_code = 2

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {' '.join(self.message.splitlines())}", file=file, err=file is None)


class CommandGroup(click.Group):
    """A group of click commands, some its own, some offered by plugins under `kvrack.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *installed(COMMAND_GROUP)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands:
            return self.commands[cmd_name]
        try:
            return load_command(cmd_name)
        except KvrackError:
            return None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in self.commands:
            return super().resolve_command(ctx, args)
        if name not in installed(COMMAND_GROUP):
            raise Failure(_unknown_command(name, self.list_commands(ctx)))
        return name, load_command(name), args[1:]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        lines = []
        for name in self.list_commands(ctx):
            try:
                command = self.commands.get(name) or load_command(name)
                lines.append((name, command.get_short_help_str(limit=formatter.width)))
            except KvrackError as error:
                lines.append((name, f"(broken) {error}"))
        with formatter.section("Commands"):
            formatter.write_dl(lines)

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.ClickException as error:
            _fail(error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KvrackError as error:
            raise Failure(str(error)) from error
        except click.ClickException as error:
            _fail(error)


def _fail(error: click.ClickException) -> NoReturn:
    # Since click 8.2 a group without a subcommand raises its help text as an error.
    if isinstance(error, (Failure, getattr(click.exceptions, "NoArgsIsHelpError", Failure))):
        raise error
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        message = f"{message.removesuffix('.')}. See: {error.ctx.command_path} --help"
    raise Failure(message) from error


def _unknown_command(name: str, commands: list[str]) -> str:
    text = f"unknown command {name!r}. Installed: {listed(commands)}."
    if name in KNOWN_COMMANDS:
        return f"{text} {name!r} is provided by another distribution: pip install '{KNOWN_COMMANDS[name]}'"
    match = closest(name, [*commands, *KNOWN_COMMANDS])
    return f"{text} Did you mean {match!r}?" if match else text


def read_settings(ctx: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, object]:
    """Turn ``--set key=value`` into a config, as the callback of an option that may be repeated."""
    from kvrack.config import parse_settings

    try:
        return parse_settings(pairs)
    except InvalidConfig as error:
        raise click.BadParameter("; ".join(error.problems), ctx=ctx, param=parameter) from error


settings_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    callback=read_settings,
    help="A setting of the backend, as in cache_config; the value is read as JSON where it is JSON. Repeatable.",
)
"""The option ``--set``, alike in every command that takes settings; the command gets them as `settings`."""


def output() -> Console:
    """Return a console on stdout that prints text as it is: 80 columns and no colour when piped."""
    return Console(highlight=False, markup=False, emoji=False)


def table(*columns: str) -> Table:
    """Return a table that folds what is too long for a cell and never cuts it off."""
    found = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        found.add_column(column, overflow="fold")
    return found


def print_json(data: Mapping[str, Any]) -> None:
    """Write `data` to stdout as indented JSON; what JSON has no form for is written as text."""
    click.echo(json.dumps(data, indent=2, default=str, ensure_ascii=False))


@click.group(cls=CommandGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package.__version__, prog_name="kvrack", message="%(prog)s %(version)s")
@click.pass_context
def kvrack(ctx: click.Context) -> None:
    """Publish, choose and trust a KV cache for PyTorch language models."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


@kvrack.command("backends")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_backends(as_json: bool) -> None:
    """List the installed cache backends, broken ones with the reason."""
    from kvrack.config import ALIASES

    found = backends()
    if as_json:
        rows = [
            {
                "name": info.name,
                "distribution": info.distribution,
                "version": info.version,
                "status": "broken" if info.error else "ok",
                "summary": info.summary,
                "error": str(info.error) if info.error else None,
            }
            for info in found.values()
        ]
        print_json({"backends": rows, "aliases": ALIASES})
        return
    console = output()
    if found:
        rows_table = table("name", "distribution", "version", "status", "what it is")
        for info in found.values():
            status = "broken" if info.error else "ok"
            what = "(see below)" if info.error else info.summary
            rows_table.add_row(info.name, info.distribution, info.version, status, what)
        console.print(rows_table)
    else:
        console.print("No cache backend is installed. The first to have: pip install kvrack-dynamic")
    broken = {info.name: str(info.error) for info in found.values() if info.error}
    for title, lines in (("broken", broken), ("aliases", ALIASES)):
        if lines:
            console.print(f"\n{title}", style="bold")
            width = max(map(len, lines))
            for name, text in lines.items():
                # Not wrapped, so that a pip line in it can be copied; a terminal folds it by itself.
                console.print(f"{name:<{width}}  {text}", soft_wrap=True)


@kvrack.command("show")
@click.argument("name")
@settings_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, the settings' JSON schema included.")
def show_backend(name: str, settings: dict[str, object], as_json: bool) -> None:
    """Show the settings of backend NAME and what its layers promise."""
    from kvrack.show import describe, render

    description = describe(name, settings)
    if as_json:
        print_json(description.to_dict())
    else:
        render(description, output())
