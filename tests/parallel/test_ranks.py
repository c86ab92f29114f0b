"""A model split over ranks answers through every cache as one process does, and so do ranks that share a batch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import kvrack
from kvrack import Shard

sys.path.insert(0, str(Path(__file__).parent))
from launcher import RanksError, launch, reports
from ranks import USES, WINDOWED

SECONDS = 300

Reports = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two(folder: Path) -> Reports:
    """What each of two ranks reports."""
    return launch("two", 2, folder, SECONDS)


@pytest.fixture(scope="module")
def death(folder: Path, two: Reports) -> str:
    """How a launch of four ranks ended, in the folder where two have saved: one is killed, after all have reported."""
    with pytest.raises(RanksError) as died:
        launch("four", 4, folder, SECONDS)
    return str(died.value)


@pytest.fixture(scope="module")
def four(folder: Path, death: str) -> Reports:
    """What each of four ranks reports."""
    try:
        return reports(folder, "four", 4)
    except FileNotFoundError:
        pytest.fail(death)


# --- tensor parallelism ---------------------------------------------------------------------------


def test_every_installed_name_is_used() -> None:
    assert set(kvrack.backends()) - {"quantized"} <= {name for name, _ in USES.values()}


@pytest.mark.parametrize("use", USES)
def test_a_rank_has_its_heads_and_answers_as_one_process(two: Reports, use: str) -> None:
    for report in two:
        expect_a_share(report["llama"][use], ranks=2)


@pytest.mark.parametrize("use", WINDOWED)
def test_windows_are_a_ranks_as_well(two: Reports, use: str) -> None:
    for report in two:
        expect_a_share(report["mistral"][use], ranks=2)


def test_each_of_four_ranks_has_its_head_and_answers_as_one_process(four: Reports) -> None:
    for report in four:
        for got in report["four"].values():
            expect_a_share(got, ranks=4)


def expect_a_share(got: dict[str, Any], ranks: int) -> None:
    assert got["tokens"] == got["expected"]
    assert got["heads"] == got["spec"] == [1, 1]
    assert got["bytes"]
    assert {role: ranks * nbytes for role, nbytes in got["bytes"].items()} == got["whole bytes"]
    assert got["continued"] == got["not saved"]


def test_beams_are_reordered_in_every_rank(two: Reports) -> None:
    for report in two:
        assert report["beams"]["dynamic"] == report["beams"]["static"] == report["beams"]["expected"]


def test_a_prefix_store_in_one_folder_serves_every_rank(two: Reports) -> None:
    for report in two:
        assert report["store"]["tokens"][:2] == [report["store"]["expected"]] * 2
        assert report["store"]["hits"][:2] == [0, 1]


def test_ranks_whose_stores_differ_start_anew_together(two: Reports) -> None:
    assert [report["store"]["hits"][2] for report in two] == [0, 1]
    for report in two:
        assert report["store"]["tokens"][2] == report["store"]["expected"]


def test_a_fingerprint_is_of_a_ranks_part(two: Reports) -> None:
    first, second = (report["fingerprints"] for report in two)
    for part, again, _ in (first, second):
        assert part == again
    assert first[2] == second[2]
    assert len({first[0], second[0], first[2]}) == 3


# --- files ----------------------------------------------------------------------------------------


def test_each_rank_saves_a_file_of_its_own(two: Reports, folder: Path) -> None:
    for use in USES:
        assert {path.name for path in folder.glob(f"{use}.*kv")} >= {f"{use}.rank0of2.kv", f"{use}.rank1of2.kv"}
        assert not (folder / f"{use}.kv").exists()
    assert kvrack.load(folder / "dynamic.kv", shard=Shard(1, 2)).model_spec.shard == Shard(1, 2)


def test_another_number_of_ranks_is_refused(two: Reports, four: Reports, folder: Path) -> None:
    with pytest.raises(kvrack.SnapshotError, match=r"fp8\.kv was saved by 2 ranks, .*for a model that is not split"):
        kvrack.load(folder / "fp8.kv")
    for rank, report in enumerate(four):
        assert "fp8.kv was saved by 2 ranks" in report["of two"]
        assert f"to be loaded for rank {rank} of 4" in report["of two"]
    for rank, report in enumerate(two):
        assert f"whole{rank}.kv was saved by a model that is not split over ranks" in report["of one process"]
        assert f"to be loaded for rank {rank} of 2" in report["of one process"]


# --- data parallelism -----------------------------------------------------------------------------


@pytest.mark.parametrize("use", ["dynamic", "static", "hqq"])
def test_ranks_that_share_a_batch_answer_as_one(two: Reports, use: str) -> None:
    for report in two:
        got = report["data parallel"][use]
        assert got["tokens"] == got["rebuilt"] == got["expected"]


# --- death ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four")
def test_a_rank_that_is_killed_ends_all_of_them(death: str) -> None:
    assert "not all of 4 ranks came to their end" in death
    assert "Signal 9 (SIGKILL)" in death
    assert "Timeout" not in death
