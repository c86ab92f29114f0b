"""The subcommands this distribution adds to ``kvrack``. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrack import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def kvrack_command(name: str) -> click.Command | None:
    """Return the subcommand `generate`, `chat`, `plan` or `bench`."""
    if name == "generate":
        from kvrack_transformers.generate_command import generate

        return generate
    if name == "chat":
        from kvrack_transformers.chat_command import chat

        return chat
    if name == "plan":
        from kvrack_transformers.plan_command import plan

        return plan
    if name == "bench":
        from kvrack_transformers.bench.command import bench

        return bench
    return None
