"""``kvrack new NAME``: write the project of a third-party backend, which conforms as it is written."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template

import click

from kvrack.config import ALIASES, KNOWN_DISTRIBUTIONS
from kvrack.registry import installed

NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")

COMMON = {
    "pyproject.toml.tmpl": "pyproject.toml",
    "README.md.tmpl": "README.md",
    "gitignore.tmpl": ".gitignore",
    "workflow.yml.tmpl": ".github/workflows/conformance.yml",
    "py.typed.tmpl": "src/$package/py.typed",
}
LAYER = {
    "layer_init.py.tmpl": "src/$package/__init__.py",
    "layer.py.tmpl": "src/$package/layer.py",
    "layer_test.py.tmpl": "tests/test_$module.py",
}
CODEC = {
    "codec_init.py.tmpl": "src/$package/__init__.py",
    "codec.py.tmpl": "src/$package/codec.py",
    "codec_test.py.tmpl": "tests/test_$module.py",
}
"""Template -> path in the project, for what every project has and for each kind."""


@dataclass(frozen=True)
class Project:
    """A project to be written.

    Attributes:
        name: the backend's name, the `cache_implementation` string.
        codec: whether it brings a codec instead of a layer.
    """

    name: str
    codec: bool

    @property
    def distribution(self) -> str:
        """Name of the distribution and of the project's folder."""
        return f"kvrack-{self.name.replace('_', '-')}"

    @property
    def module(self) -> str:
        """The name as a Python identifier."""
        return self.name.replace("-", "_")

    @property
    def package(self) -> str:
        """Name of the import package."""
        return f"kvrack_{self.module}"

    def files(self) -> dict[str, str]:
        """Return the text of every file by its path in the project."""
        words = {
            "name": self.name,
            "distribution": self.distribution,
            "module": self.module,
            "package": self.package,
            "prefix": "".join(word.capitalize() for word in self.module.split("_")),
            "kind": "codec" if self.codec else "layer",
        }
        folder = files("kvrack_spec") / "templates"
        return {
            Template(path).substitute(words): Template((folder / template).read_text("utf-8")).substitute(words)
            for template, path in {**COMMON, **(CODEC if self.codec else LAYER)}.items()
        }


def refusal(project: Project, folder: Path) -> str | None:
    """Return in one line why the project can't be written to `folder`, None when it can."""
    name = project.name
    if not NAME.fullmatch(name) or keyword.iskeyword(project.module):
        return f"{name!r} can't name a backend: expected lower-case words of letters and digits joined by - or _"
    taken = installed().get(name)
    if taken is not None:
        return f"a cache backend {name!r} is installed already ({taken[0].value}). Choose another name"
    if name in ALIASES or name in KNOWN_DISTRIBUTIONS:
        return f"{name!r} is a name of kvrack's own. Choose another name"
    try:
        distribution(project.distribution)
    except PackageNotFoundError:
        pass
    else:
        return f"a distribution {project.distribution} is installed already. Choose another name"
    if find_spec(project.package) is not None:
        return f"a package {project.package} can be imported already. Choose another name"
    if folder.exists():
        return f"{folder} exists already. Remove it, or choose another name or --into another folder"
    if not folder.parent.is_dir():
        return f"{folder.parent} is not a folder. Make it first, or choose --into another one"
    return None


def write(project: Project, folder: Path) -> None:
    """Write the project to `folder`, which must not exist."""
    for path, text in project.files().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")


@click.command(name="new")
@click.argument("name")
@click.option("--codec", is_flag=True, help="Write encode and decode, and let kvrack keep the tokens.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path(),
    help="Folder to write the project's folder to. Default: the current one.",
)
def new(name: str, codec: bool, into: Path) -> None:
    """Write a complete plugin project for a backend NAME, which conforms as generated."""
    project = Project(name, codec)
    folder = into / project.distribution
    if (reason := refusal(project, folder)) is not None:
        raise click.UsageError(reason)
    write(project, folder)
    click.echo(f"Wrote {folder}, a backend {name!r} with a {'codec' if codec else 'layer'} of its own. Next:")
    click.echo(f"  python -m pip install -e '{folder}[test]'")
    click.echo(f"  kvrack conform {name}")
