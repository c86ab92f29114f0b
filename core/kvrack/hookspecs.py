"""The pluggy hooks a plugin may implement, and the marker it does so with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

from kvrack.backend import Backend

if TYPE_CHECKING:
    import click

    from kvrack.events import CacheEvent

PROJECT = "kvrack"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def kvrack_backend(name: str) -> Backend | None:
    """Return the backend of this name.

    Entry-point group ``kvrack``; the entry point's name is the backend's. The module that
    implements it must import neither torch nor the library it wraps.

    Args:
        name: the entry point's name, for a module that serves several.
    """


@hookspec
def kvrack_cache_event(event: CacheEvent) -> None:
    """Take note of what a cache did.

    Entry-point group ``kvrack.listeners``; the entry point's name is free. The modules of that group are imported when
    the process makes its first cache, and told from then on; see `kvrack.listen`.

    Args:
        event: what was done, just now, in this thread.
    """


@hookspec
def kvrack_command(name: str) -> click.Command | None:
    """Return the subcommand of this name for the command line.

    Entry-point group ``kvrack.commands``; the entry point's name is the subcommand's.

    Args:
        name: the entry point's name, for a module that serves several.
    """
