"""A model split over two ranks by tensor parallelism answers through every cache as one process does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import kvrack

sys.path.insert(0, str(Path(__file__).parent))
from launcher import launch
from ranks import USES

SECONDS = 150


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of two ranks reports."""
    return launch("split", 2, folder, SECONDS)


def test_every_installed_name_is_used() -> None:
    assert set(kvrack.backends()) - {"quantized"} <= {name for name, _ in USES.values()}


@pytest.mark.parametrize("model", ["llama", "mistral"])
@pytest.mark.parametrize("use", USES)
def test_a_rank_has_its_heads_and_answers_as_one_process(ranks: list[dict[str, Any]], model: str, use: str) -> None:
    for report in ranks:
        got = report[model][use]
        assert got["tokens"] == got["expected"]
        assert got["heads"] == got["spec"] == [1, 1]
        assert got["bytes"]
        assert {role: 2 * nbytes for role, nbytes in got["bytes"].items()} == got["whole bytes"]
