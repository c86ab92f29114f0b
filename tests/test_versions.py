"""The README's table of tested versions, tox.ini and what the distributions declare say the same."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 reads no TOML")

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| (\w+) \| ([\d.]+)[^|]* \| ([\d.]+|what pip takes) \|$", re.MULTILINE)
TESTED = {name: (oldest, newest) for name, oldest, newest in ROW.findall((ROOT / "README.md").read_text("utf-8"))}


def rack() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(ROOT / "tox.ini")
    return parser["rack"]


def least(folder: str) -> dict[str, Version]:
    """Return the lower bounds that a distribution declares, extras included, by name."""
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = [(each.name, bound) for each in map(Requirement, lines) for bound in each.specifier]
    return {name: Version(bound.version) for name, bound in declared if bound.operator == ">="}


def test_the_table_is_found() -> None:
    assert list(TESTED) == [
        "transformers", "torch", "pluggy", "pydantic", "packaging", "safetensors", "click", "rich",
    ]  # fmt: skip


def test_core_lowest_installs_what_core_declares() -> None:
    lowest = dict(line.split("==") for line in rack()["lowest"].split())
    declared = {name: bound for name, bound in least(".").items() if name != "torch"}
    assert {name: Version(text) for name, text in lowest.items()} == declared
    assert {name: TESTED[name][0] for name in lowest} == lowest


def test_the_oldest_torch_and_transformers_are_those_declared() -> None:
    assert Version(rack()["oldest_torch"]) == least(".")["torch"] == Version(TESTED["torch"][0])
    bridge = least("plugins/transformers")
    assert Version(rack()["oldest_transformers"]) == bridge["transformers"] == Version(TESTED["transformers"][0])
    assert bridge["torch"] == least(".")["torch"]


def test_the_newest_are_those_that_tests_run_on() -> None:
    pinned = dict(re.findall(r"^(\w+)==(\S+)$", (ROOT / "requirements-test.txt").read_text("utf-8"), re.MULTILINE))
    assert {name: TESTED[name][1] for name in ("torch", "transformers")} == pinned
