"""The errors kvrack raises, and their words.

Every text names the thing, what was expected, what was seen and the remedy, in one or two lines.
`KvrackError` is the common base; each class also derives from the built-in error that callers
already catch for that kind of fault.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Literal

BACKEND = "cache backend"
"""What the texts below call a plugin that offers a cache; one that offers a subcommand is a "command"."""


class KvrackError(Exception):
    """Base of every error that kvrack raises on purpose."""


def closest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate most like `word`, or None if none is near."""
    matches = difflib.get_close_matches(word, list(candidates), n=1, cutoff=0.6)
    return matches[0] if matches else None


def listed(words: Sequence[str]) -> str:
    """Return the words as one comma-separated phrase, 'none' when there are none."""
    return ", ".join(words) if words else "none"


class UnknownBackend(KvrackError, ValueError):
    """No installed distribution offers a backend of this name."""

    def __init__(
        self, name: str, installed: Sequence[str], distribution: str | None = None, aliases: Sequence[str] = ()
    ) -> None:
        self.name = name
        text = f"unknown cache backend {name!r}. Installed: {listed(installed)}."
        if distribution is not None:
            text += f" {name!r} is provided by {distribution}: pip install {distribution}"
        elif match := closest(name, [*installed, *aliases]):
            text += f" Did you mean {match!r}?"
        super().__init__(text)


class BackendLoadError(KvrackError):
    """A backend is installed, but its plugin raised while it was loaded (see `__cause__`)."""

    def __init__(self, name: str, provider: str, cause: BaseException, kind: str = BACKEND) -> None:
        self.name = name
        super().__init__(
            f"{kind} {name!r} (from {provider}) is installed but failed to load: {type(cause).__name__}: {cause}"
        )
        self.__cause__ = cause


class InvalidPlugin(KvrackError, TypeError):
    """A plugin loaded, but what it offers does not keep the plugin contract."""

    def __init__(self, name: str, provider: str, reason: str, kind: str = BACKEND) -> None:
        self.name = name
        super().__init__(f"{kind} {name!r} (from {provider}) is not a valid plugin: {reason}")


class MissingDependency(KvrackError, ImportError):
    """A backend needs a library that is absent or too old."""

    def __init__(self, name: str, requirement: str, found: str | None = None, kind: str = BACKEND) -> None:
        self.backend = name
        self.requirement = requirement
        seen = f"version {found} is installed" if found else "which is not installed"
        super().__init__(f"{kind} {name!r} needs {requirement}, {seen}. Run: pip install '{requirement}'")


class DuplicateBackend(KvrackError):
    """Two distributions offer the same name; neither is picked."""

    def __init__(self, name: str, providers: Sequence[str], kind: str = BACKEND) -> None:
        self.name = name
        self.providers = tuple(providers)
        remove = " or ".join(f"pip uninstall {provider.split()[0]}" for provider in providers)
        super().__init__(
            f"{kind} {name!r} is offered by more than one distribution: {' and '.join(providers)}. Keep one: {remove}"
        )


class InvalidConfig(KvrackError, ValueError):
    """A backend's config has an unknown key or a value that does not validate."""

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        self.name = name
        self.problems = tuple(problems)
        super().__init__(f"config of cache backend {name!r}: {'; '.join(problems)}")


class UnsupportedOperation(KvrackError, NotImplementedError):
    """A layer refuses what it cannot do. Nothing was changed.

    Args:
        backend: name of the backend, or of the layer class where no backend is known.
        operation: the method or promise, with the `Capabilities` field in brackets where one
            governs it, as in ``crop [crops]``.
        remedy: what to call or choose instead.
    """

    def __init__(self, backend: str, operation: str, remedy: str) -> None:
        self.backend = backend
        self.operation = operation
        self.remedy = remedy
        super().__init__(f"{backend}: {operation} is not supported. {remedy}")


class CapacityExceeded(KvrackError, ValueError):
    """A preallocated layer was asked for more tokens than it has room for. Nothing was written."""

    def __init__(self, capacity: int, held: int, asked: int) -> None:
        self.capacity = capacity
        self.held = held
        self.asked = asked
        super().__init__(
            f"cache capacity is {capacity} tokens, {held} are held and {asked} more were asked for. "
            f"Build the cache with max_cache_len={held + asked} or more"
        )


class OffloadError(KvrackError, OSError):
    """What is held elsewhere can't be written or read there. The layer holds what it held before; all others too."""


class MemoryRefused(OffloadError, MemoryError):
    """A place has no room for what is to be held there: a full disk, a quota, pinned memory that runs out."""


class ShapeMismatch(KvrackError, ValueError):
    """States do not fit what the layer's first update decided. Nothing was written."""


SnapshotFault = Literal["foreign", "newer", "other model", "other shard", "truncated", "corrupted"]


class SnapshotError(KvrackError, ValueError):
    """A file cannot be loaded as a cache.

    Attributes:
        fault: "foreign" for a file that kvrack didn't save, "newer" for a later format, "other
            model" for another fingerprint, "other shard" for another rank's part of the heads or
            another number of ranks, "truncated" or "corrupted" for one that was damaged.
    """

    def __init__(self, text: str, fault: SnapshotFault) -> None:
        self.fault = fault
        super().__init__(text)
