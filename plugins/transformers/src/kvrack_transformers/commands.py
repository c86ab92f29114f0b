"""The subcommands this distribution adds to ``kvrack``. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrack import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def kvrack_command(name: str) -> click.Command:
    """Return the subcommand `generate` or `plan`."""
    if name == "plan":
        from kvrack_transformers.plan_command import plan

        return plan
    from kvrack_transformers.generate_command import generate

    return generate
