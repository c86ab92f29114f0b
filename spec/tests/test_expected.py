"""The file of expected failures."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrack_spec.expected import InvalidExpectedFailures, read_expected_failures


def test_lines_name_checks_and_reasons(tmp_path: Path) -> None:
    path = tmp_path / "expected.txt"
    path.write_text("# known\n\ntest_crop.py::test_a[cpu-(3, 0)-x]  # not yet\ntest_crop.py::test_b # never # ever\n")
    first, second = read_expected_failures(path)
    assert (first.check, first.reason) == ("test_crop.py::test_a[cpu-(3, 0)-x]", "not yet")
    assert second.reason == "never # ever"
    assert second.names("test_crop.py::test_b[cpu]")
    assert not second.names("test_crop.py::test_bb[cpu]")
    assert not first.names("test_crop.py::test_a[cpu]")


def test_a_line_without_a_reason_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "expected.txt"
    path.write_text("test_crop.py::test_a\n")
    with pytest.raises(InvalidExpectedFailures, match=r"line 1: expected '<check>  # <reason>', got 'test_crop"):
        read_expected_failures(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidExpectedFailures, match="cannot read"):
        read_expected_failures(tmp_path / "none.txt")
