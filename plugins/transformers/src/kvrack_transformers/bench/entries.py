"""The caches to measure: what ``--cache`` asks for, and how each is made."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click

import kvrack
from kvrack.config import parse_settings
from kvrack.errors import InvalidConfig
from kvrack_transformers.bench.results import Side, label

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL = "all"
FIRST = "dynamic"
PAIRS = re.compile(r",(?=\s*[A-Za-z_][\w.]*\s*=)")
"""Commas between settings; one within a JSON value is followed by no ``key=``."""


@dataclass(frozen=True)
class Asked:
    """One ``--cache``.

    Attributes:
        text: as it was written.
        name: the backend's name.
        settings: its settings.
    """

    text: str
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """A cache to measure.

    Attributes:
        cache: the text that asked for it.
        side: whose it is.
        made_by: the call that makes it.
        make: makes it, empty, for a model and the number of tokens that will come.
    """

    cache: str
    side: Side
    made_by: str
    make: Callable[[PreTrainedModel, int], Any]

    @property
    def label(self) -> str:
        """Its name for a reader."""
        return label(self.side, self.cache)


def parse_cache(text: str) -> Asked:
    """Return what ``NAME[:key=value,...]`` asks for, the name and settings checked.

    Raises click.BadParameter for a pair that is none, and what `kvrack.resolve` raises.
    """
    name, colon, rest = text.partition(":")
    if not name or (colon and not rest.strip()):
        raise click.BadParameter(f"expected NAME or NAME:key=value,..., got {text!r}", param_hint="'--cache'")
    try:
        settings = parse_settings([pair.strip() for pair in PAIRS.split(rest)]) if colon else {}
    except InvalidConfig as error:
        raise click.BadParameter(f"{text}: {'; '.join(error.problems)}", param_hint="'--cache'") from error
    kvrack.resolve(name, settings)
    return Asked(text, name, settings)


def parse_caches(texts: tuple[str, ...]) -> tuple[list[Asked], dict[str, str]]:
    """Return the caches asked for, each once, and those of `all` that can't be used, with the reason."""
    from kvrack.companions import CROSS_ATTENTION, STATES  # imports torch

    asked: dict[str, Asked] = {}
    left_out: dict[str, str] = {}
    for text in texts:
        if text != ALL:
            asked.setdefault(text, parse_cache(text))
            continue
        for name, info in sorted(kvrack.backends().items(), key=lambda each: (each[0] != FIRST, each[0])):
            if info.error is not None:
                left_out[name] = one_line(info.error)
            elif name in (STATES, CROSS_ATTENTION):
                left_out[name] = "it takes its attention layers from another backend, which is measured by itself"
            else:
                asked.setdefault(name, Asked(name, name))
    if not asked:
        raise kvrack.KvrackError(
            f"no installed cache backend can be measured: {'; '.join(left_out.values()) or 'none is installed'}"
        )
    return list(asked.values()), left_out


def entry_of(asked: Asked) -> Entry:
    """Return kvrack's cache that was asked for."""

    def make(model: PreTrainedModel, tokens: int) -> Any:
        from kvrack_transformers.creating import create_cache

        return create_cache(model, asked.name, max_length=tokens, **asked.settings)

    settings = "".join(f", {key}={value!r}" for key, value in asked.settings.items())
    return Entry(asked.text, "kvrack", f"kt.create_cache(model, {asked.name!r}{settings})", make)


def one_line(error: BaseException) -> str:
    """Return what an exception says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2]) or "no reason given"
    return text if isinstance(error, kvrack.KvrackError) else f"{type(error).__name__}: {text}"
