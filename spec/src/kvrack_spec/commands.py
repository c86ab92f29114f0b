"""The subcommands of kvrack-spec. Imports neither click nor torch until one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrack import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def kvrack_command(name: str) -> click.Command | None:
    """Return ``kvrack conform`` or ``kvrack new``."""
    if name == "conform":
        from kvrack_spec.conform import conform

        return conform
    if name == "new":
        from kvrack_spec.new import new

        return new
    return None
