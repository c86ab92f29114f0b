"""The fake distribution under installed/, installed for these tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

INSTALLED = Path(__file__).parent / "installed"


@pytest.fixture
def fake_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the backends under installed/ on the path, here and in subprocesses."""
    monkeypatch.syspath_prepend(str(INSTALLED))
    paths = [str(INSTALLED), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
