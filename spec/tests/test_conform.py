"""``kvrack conform``, as its users meet it: what it prints, and how it ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvrack.registry import load_command

pytestmark = pytest.mark.usefixtures("fake_distribution")
CROP = "test_crop.py::test_crop_leaves_what_fewer_tokens_would_have_left"


def _conform(*arguments: str) -> Result:
    return CliRunner().invoke(load_command("conform"), arguments)


def test_a_good_backend_conforms(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    done = _conform("fake", "--set", "growth=2.0", "--quick", "--device", "cpu", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "settings:  growth=2.0" in done.output
    assert "declined:  records_past, compiles, stable_address" in done.output
    verdict = done.output.strip().splitlines()[-1]
    assert verdict == (
        "CONFORMS (kvrack-spec 1.0, quick): 9 of 12 capabilities, 1 refused as declared, 2 not promised, 0 failed"
    )
    data = json.loads(path.read_text())
    assert data["conforms"]
    assert data["verdict"] == verdict
    assert data["settings"] == {"growth": 2.0}
    assert data["capabilities"]["records_past"] == {"declared": False, "result": "refused"}
    assert {check["outcome"] for check in data["checks"]} == {"passed", "refused", "not run"}


def test_a_wrong_backend_does_not_and_is_told_how_to_mend() -> None:
    done = _conform("fake-wrong", "-k", "test_crop_leaves", "--quick")
    assert done.exit_code == 1
    assert f"FAILED {CROP}" in done.output
    assert "rule L18: `crop(-n)` leaves" in done.output
    assert "declared: crops=True" in done.output
    told = re.search(r"expected: get_seq_length\(\) (\d+)\n\s*seen:     (\d+)", done.output)
    assert told, done.output
    assert int(told[2]) == int(told[1]) - 1
    assert "declare crops=False" in done.output
    assert done.output.strip().splitlines()[-1].startswith("DOES NOT CONFORM")


def test_expected_failures_are_told_apart_and_kept_strictly(tmp_path: Path) -> None:
    path = tmp_path / "expected.txt"
    path.write_text(f"{CROP}  # removes one too many\n")
    done = _conform("fake-wrong", "-k", "test_crop_leaves", "--expected-failures", str(path))
    assert done.exit_code == 1, "only expected failures: nothing passed"
    done = _conform("fake-wrong", "-k", "test_crop_leaves or signatures", "--expected-failures", str(path))
    assert done.exit_code == 0, done.output
    assert "9 expected failures" in done.output


@pytest.mark.parametrize("line", [f"{CROP}  # it works by now", "test_crop.py::test_no_such_check  # renamed"])
def test_a_stale_expected_failure_fails(tmp_path: Path, line: str) -> None:
    path = tmp_path / "expected.txt"
    path.write_text(f"{line}\n")
    done = _conform("fake", "-k", "test_crop_leaves", "--quick", "--expected-failures", str(path))
    assert done.exit_code == 1
    assert "stale expected failure" in done.output


def test_nothing_selected_is_a_failure() -> None:
    done = _conform("fake", "-k", "no_such_check")
    assert done.exit_code == 1
    assert "no check was run" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("fakee",), "unknown cache backend 'fakee'"),
        (("fake-absent",), "cache backend 'fake-absent' (from kvrack-fake 1.0) is installed but failed to load"),
        (("fake-unbuildable",), "failed to load: AttributeError"),
        (("fake", "--set", "banana=1"), "unknown key 'banana'. Valid keys: growth"),
        (("fake", "--set", "banana"), "expected key=value, got 'banana'"),
        (("fake", "--device", "abacus"), "'abacus' can't be used here"),
        (("fake", "--expected-failures", "/no/such/file"), "cannot read /no/such/file"),
    ],
)
def test_what_cannot_be_loaded_is_said_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    done = _conform(*arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert done.output.startswith("error: ")


def test_the_directory_it_is_run_in_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\npython_files = nothing_*.py\n")
    (tmp_path / "conftest.py").write_text("raise RuntimeError('not ours')\n")
    code = "from kvrack.registry import load_command; load_command('conform')()"
    command = [sys.executable, "-c", code, "fake", "-k", "test_signatures", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSES WHAT WAS SELECTED, 3 checks" in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == [
        "conftest.py",
        "pytest.ini",
    ]


def test_pytest_runs_the_same(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pyargs",
        "kvrack_spec",
        "-p",
        "no:cacheprovider",
        "-k",
        "test_signatures",
    ]
    done = subprocess.run(
        [*command, "--kvrack-backend", "fake"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSES WHAT WAS SELECTED, 3 checks" in done.stdout
    for arguments, words in (
        ([], "add --kvrack-backend NAME"),
        (["--kvrack-backend", "nil"], "unknown cache backend 'nil'"),
    ):
        done = subprocess.run(
            [*command, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode != 0
        assert words in done.stdout + done.stderr
