"""The rules of SPEC.md, read from its text, so that they are written down once."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

_RULE = re.compile(r"^- \*\*([BLCFSXD]\d+)\*\* (.+)$", re.MULTILINE)
_VERSION = re.compile(r"^Version (\d+\.\d+)$", re.MULTILINE)

UNDECLINABLE = "cannot be declined"


def spec_path() -> Path:
    """Return where SPEC.md lies: beside this module when installed, in the source tree otherwise."""
    packaged = Path(__file__).with_name("SPEC.md")
    return packaged if packaged.is_file() else Path(__file__).parents[2] / "SPEC.md"


@lru_cache(maxsize=1)
def rules() -> dict[str, str]:
    """Return the text of each rule by its id, in the order of SPEC.md."""
    return dict(_RULE.findall(spec_path().read_text(encoding="utf-8")))


def version() -> str:
    """Return the version that SPEC.md states. Raises ValueError if it states none."""
    found = _VERSION.search(spec_path().read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{spec_path()} states no version: expected a line 'Version <major>.<minor>'")
    return found.group(1)
