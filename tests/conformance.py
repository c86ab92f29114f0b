"""How tests run the conformance suite in their own process."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from kvrack_spec.conform import pytest_arguments, run_conformance
from kvrack_spec.result import Result


def run_suite(
    name: str, quick: bool = False, keyword: str | None = None, settings: tuple[str, ...] = ()
) -> tuple[Result, str]:
    """Run the suite over one backend on the CPU; return the result and what was printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        _, result = run_conformance(pytest_arguments(name, settings, devices=("cpu",), quick=quick, keyword=keyword))
    assert result is not None, out.getvalue()
    return result, out.getvalue()


def put_on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Install, for the length of a test, the distribution that lies in `folder` with its dist-info."""
    monkeypatch.syspath_prepend(str(folder))
