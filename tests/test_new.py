"""`kvrack new`: what it writes installs in a fresh environment, is found, passes its own tests and conforms."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrack.commands import kvrack

KINDS = {"layer": [], "codec": ["--codec"]}


def new(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(kvrack, ["new", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fresh virtual environment that sees this one's distributions; returns its folder of programs.

    A .pth file and not `system_site_packages`, which would show the packages of the Python that this
    environment itself was made from.
    """
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    purelib = run(programs, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    # site.addsitedir and not a bare path: editable installs are .pth files themselves.
    lines = [f"import site; site.addsitedir({path!r})" for path in {sysconfig.get_path("purelib"), *_base_paths()}]
    (Path(purelib) / "outer.pth").write_text("\n".join(lines) + "\n")
    return programs


def _base_paths() -> list[str]:
    return [path for path in sys.path if path.endswith("site-packages")]


def run(programs: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(programs / "python"), *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_conforms_as_it_is(tmp_path: Path, environment: Path, kind: str) -> None:
    name = f"made-by-new-{kind}"
    code, output = new(name, *KINDS[kind], "--into", str(tmp_path))
    assert code == 0, output
    project = tmp_path / f"kvrack-{name}"
    run(environment, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", str(project))
    command_line = ("-m", "kvrack.cli")
    assert name in run(environment, *command_line, "backends", cwd=tmp_path).stdout
    run(environment, "-m", "pytest", "-q", str(project), cwd=project)
    verdict = run(environment, *command_line, "conform", name, "--quick", cwd=tmp_path).stdout.splitlines()[-1]
    assert verdict.startswith("CONFORMS ")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_whole(tmp_path: Path, kind: str) -> None:
    code, output = new("my_cache", *KINDS[kind], "--into", str(tmp_path))
    assert code == 0, output
    project = tmp_path / "kvrack-my-cache"
    written = {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}
    assert written == {
        ".github/workflows/conformance.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "src/kvrack_my_cache/__init__.py",
        f"src/kvrack_my_cache/{kind}.py",
        "src/kvrack_my_cache/py.typed",
        "tests/test_my_cache.py",
    }
    assert "$" not in (project / "pyproject.toml").read_text()
    assert "${{ matrix.python }}" in (project / ".github/workflows/conformance.yml").read_text()
    assert "kvrack conform my_cache" in output


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My Cache", "can't name a backend"),
        ("1st", "can't name a backend"),
        ("../up", "can't name a backend"),
        ("dynamic", "installed already"),
        ("quantized", "name of kvrack's own"),
        ("spec", "distribution kvrack-spec is installed already"),
    ],
)
def test_a_name_that_cannot_be_is_refused_in_one_line(tmp_path: Path, name: str, said: str) -> None:
    code, output = new(name, "--into", str(tmp_path))
    assert code == 2
    assert said in output
    assert len(output.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvrack-mine").mkdir()
    code, output = new("mine", "--into", str(tmp_path))
    assert code == 2
    assert "exists already" in output
    assert list((tmp_path / "kvrack-mine").iterdir()) == []
    code, output = new("mine", "--into", str(tmp_path / "nowhere"))
    assert code == 2
    assert "is not a folder" in output
