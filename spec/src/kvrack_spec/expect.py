"""How a check says what it expected and what it saw."""

from __future__ import annotations

from typing import NoReturn


class Broken(AssertionError):
    """A rule is not kept. Carries what was expected and what was seen, for the report."""

    def __init__(self, expected: str, seen: str) -> None:
        self.expected = expected
        self.seen = seen
        super().__init__(f"expected {expected}, saw {seen}")


def broken(expected: str, seen: object) -> NoReturn:
    """Raise Broken."""
    raise Broken(expected, str(seen))


def expect(kept: bool, expected: str, seen: object) -> None:
    """Raise Broken unless `kept`. `seen` is what there was instead."""
    if not kept:
        broken(expected, seen)


def expect_equal(seen: object, expected: object, what: str) -> None:
    """Raise Broken unless `seen` equals `expected`."""
    expect(bool(seen == expected), f"{what} {expected!r}", repr(seen))
