"""Expected failures: checks known to fail, each with its reason, strictly kept up to date."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvrack.errors import KvrackError


class InvalidExpectedFailures(KvrackError, ValueError):
    """A file of expected failures can't be read as one."""


@dataclass
class ExpectedFailure:
    """One line of the file.

    Attributes:
        check: id of a check, ``test_crop.py::test_name[parameters]``, or without its parameters,
            which means all of them.
        reason: why it fails.
        matched: ids of the checks collected that it names.
    """

    check: str
    reason: str
    matched: list[str] = field(default_factory=list)

    def names(self, check: str) -> bool:
        """Whether this line is about the check of this id."""
        return check == self.check or check.startswith(f"{self.check}[")


def read_expected_failures(path: str | Path) -> list[ExpectedFailure]:
    """Return the lines of a file ``<check id>  # <reason>``; empty lines and lines of comment are skipped.

    Raises InvalidExpectedFailures for a file that isn't there and for a line without a reason.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidExpectedFailures(f"expected failures: cannot read {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        check, _, reason = (part.strip() for part in line.partition(" #"))
        if not reason:
            raise InvalidExpectedFailures(
                f"{path}, line {number}: expected '<check>  # <reason>', got {line.strip()!r}"
            )
        found.append(ExpectedFailure(check, reason))
    return found
