"""Fake installed distributions, so that core's tests need no plugin and see every way one can be broken."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from kvrack import registry

settings.register_profile("kvrack", deadline=None)
settings.load_profile("kvrack")

FAKE_PLUGINS = Path(__file__).parents[1] / "fake_plugins"


@dataclass(frozen=True)
class Site:
    """A folder on sys.path, into which a test installs distributions by writing their files."""

    folder: Path

    def install(
        self,
        distribution: str,
        entry_points: Mapping[str, str],
        modules: Mapping[str, str],
        version: str = "1.0",
        requires: Sequence[str] = (),
        group: str = registry.BACKEND_GROUP,
    ) -> None:
        """Write modules (file name to text) and a dist-info folder, as pip would leave them."""
        for name, text in modules.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        header = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*header, *(f"Requires-Dist: {line}" for line in requires), ""]))
        lines = [f"[{group}]", *(f"{name} = {value}" for name, value in entry_points.items()), ""]
        (info / "entry_points.txt").write_text("\n".join(lines))
        forget_installed()


def forget_installed() -> None:
    """Make the import system and the registry look at the disk again."""
    importlib.invalidate_caches()
    registry.refresh()


def forget_modules(folder: Path) -> None:
    """Remove from sys.modules whatever was imported from `folder`."""
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty folder on sys.path to install fake distributions into."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    forget_modules(folder)
    forget_installed()


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The fake plugin that offers `plain`, installed; its folder."""
    folder = FAKE_PLUGINS / "plain"
    monkeypatch.syspath_prepend(str(folder))
    forget_installed()
    yield folder
    forget_installed()
