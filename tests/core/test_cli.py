"""The command line: `kvrack`, `kvrack backends`, `kvrack show`, and what happens to plugins' commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import kvrack
from kvrack.commands import kvrack as group
from kvrack.registry import refresh
from kvrack.show import type_text

REASON = "the moon is in the wrong phase for caches, and no amount of waiting will help with that; look again in spring"

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Yield a function that puts a fake installed distribution on sys.path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    put_modules: set[str] = set()

    def put(distribution: str, entry_points: str, modules: dict[str, str]) -> None:
        info = tmp_path / f"{distribution.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(entry_points)
        for name, source in modules.items():
            (tmp_path / f"{name}.py").write_text(source)
        put_modules.update(modules)
        refresh()

    yield put
    for name in put_modules & sys.modules.keys():
        del sys.modules[name]


def run(*args: str) -> Result:
    return CliRunner().invoke(group, list(args), prog_name="kvrack")


def refused(*args: str) -> str:
    """Run a command that must fail; return its one line."""
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    return lines[0]


def start(*args: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code] if code else [sys.executable, "-m", "kvrack.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": ""})


def command_module(body: str) -> str:
    return f"import click\nimport kvrack\n\n@kvrack.hookimpl\ndef kvrack_command(name):\n{body}\n"


def backend_module(name: str, layer: str, config: str = "kvrack.config:BackendConfig") -> str:
    return (
        "import kvrack\n\n@kvrack.hookimpl\ndef kvrack_backend(name):\n"
        f"    return kvrack.Backend(name={name!r}, summary='a fake', layer={layer!r}, config={config!r})\n"
    )


# --- the group and plugins' commands ------------------------------------------------------------


def test_version_and_help_without_a_command() -> None:
    assert run("--version").stdout == f"kvrack {kvrack.__version__}\n"
    bare, help_page = run(), run("--help")
    assert bare.exit_code == help_page.exit_code == 0
    assert bare.stdout == help_page.stdout
    assert "backends" in bare.stdout
    assert "show" in bare.stdout


def test_plugin_command_is_listed_and_runs(install: Install) -> None:
    body = "    return click.Command('hi', callback=lambda: click.echo('hello'), help='Greets.')"
    install("greeter", "[kvrack.commands]\nhi = greeter\n", {"greeter": command_module(body)})
    assert "Greets." in run("--help").stdout
    assert run("hi").stdout == "hello\n"


def test_invoking_a_command_imports_no_other(install: Install) -> None:
    install(
        "other", "[kvrack.commands]\nother = other_plugin\n", {"other_plugin": "raise RuntimeError('was imported')\n"}
    )
    assert run("backends").exit_code == 0
    assert "other_plugin" not in sys.modules


def test_broken_commands_show_their_reason_and_hide_nothing(install: Install) -> None:
    install("moonlit", "[kvrack.commands]\nmoon = moonlit\n", {"moonlit": f"raise RuntimeError({REASON!r})\n"})
    install("needy", "[kvrack.commands]\nneed = needy\n", {"needy": "import no_such_library\n"})
    install("wrong", "[kvrack.commands]\nwrong = wrong\n", {"wrong": command_module("    return 3")})
    for twin in ("twin-a", "twin-b"):
        install(twin, "[kvrack.commands]\ntwice = twin\n", {"twin": command_module("    return None")})
    body = "    return click.Command('fine', help='Works.')"
    install("fine", "[kvrack.commands]\nfine = fine_plugin\n", {"fine_plugin": command_module(body)})

    page = " ".join(run("--help").stdout.split())
    assert f"(broken) command 'moon' (from moonlit 1.2) is installed but failed to load: RuntimeError: {REASON}" in page
    assert "command 'need' needs no_such_library, which is not installed. Run: pip install 'no_such_library'" in page
    assert "command 'wrong' (from wrong 1.2) is not a valid plugin: kvrack_command returned int" in page
    assert "command 'twice' is offered by more than one distribution: twin-a 1.2 and twin-b 1.2" in page
    assert "fine Works." in page
    assert "backends" in page

    assert REASON in refused("moon")
    assert "pip install 'no_such_library'" in refused("need")
    assert "not a click.Command" in refused("wrong")
    assert "pip uninstall twin-a or pip uninstall twin-b" in refused("twice")


def test_kvrack_error_in_a_command_is_one_line(install: Install) -> None:
    body = (
        "    def act():\n        raise kvrack.KvrackError('one\\ntwo')\n    return click.Command('act', callback=act)"
    )
    install("actor", "[kvrack.commands]\nact = actor\n", {"actor": command_module(body)})
    assert refused("act") == "error: one two"


def test_any_other_error_in_a_command_is_not_hidden(install: Install) -> None:
    body = "    def act():\n        raise ZeroDivisionError\n    return click.Command('act', callback=act)"
    install("actor", "[kvrack.commands]\nact = actor\n", {"actor": command_module(body)})
    assert isinstance(run("act").exception, ZeroDivisionError)


def test_unknown_command_names_the_closest_or_the_distribution(install: Install) -> None:
    assert refused("shw").endswith("Did you mean 'show'?")
    assert "Installed: backends" in refused("xyzzy")


def test_known_command_that_is_not_installed_gives_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrack.commands.installed", lambda group: {})
    assert refused("generate").endswith("pip install 'kvrack-transformers[cli]'")


def test_usage_errors_are_one_line() -> None:
    assert "--banana" in refused("--banana")
    assert refused("backends", "--banana").endswith("See: kvrack backends --help")
    assert refused("show").endswith("See: kvrack show --help")


# --- the program ---------------------------------------------------------------------------------


def test_exit_codes_of_the_program() -> None:
    good, bad = start("backends"), start("show", "no-such-backend")
    assert (good.returncode, good.stderr) == (0, "")
    assert bad.returncode == 2
    assert bad.stdout == ""
    assert bad.stderr.startswith("error: unknown cache backend 'no-such-backend'. Installed: ")
    assert bad.stderr.count("\n") == 1


@pytest.mark.parametrize("library", ["click", "rich"])
def test_without_the_extra_it_says_what_to_install(library: str) -> None:
    done = start(code=f"import sys; sys.modules[{library!r}] = None; from kvrack.cli import main; sys.exit(main())")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"error: the command line needs {library}, which is not installed. Run: pip install 'kvrack[cli]'\n"
    )


def test_listing_imports_no_torch() -> None:
    code = (
        "import sys; from kvrack.commands import kvrack\n"
        "kvrack.main(['backends'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = start(code=code)
    assert done.returncode == 0, done.stderr


# --- kvrack backends -----------------------------------------------------------------------------


def test_backends_lists_good_and_broken(install: Install) -> None:
    install("moonlit", "[kvrack]\nmoon = moonlit\n", {"moonlit": f"raise RuntimeError({REASON!r})\n"})
    done = run("backends")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    rows, broken = lines[: lines.index("broken")], lines[lines.index("broken") + 1 : lines.index("aliases")]
    cells = {line.split()[0]: line.split() for line in rows if line.strip()}
    assert cells["dynamic"][1:4] == ["kvrack-dynamic", "0.1.0", "ok"]
    assert cells["moon"][1:] == ["moonlit", "1.2", "broken", "(see", "below)"]
    reason = f"cache backend 'moon' (from moonlit 1.2) is installed but failed to load: RuntimeError: {REASON}"
    assert broken[0].split(maxsplit=1) == ["moon", reason]
    assert lines[-1].startswith("quantized  the backend that its key `backend` names")


def test_backends_folds_what_is_long_and_cuts_nothing(install: Install) -> None:
    long_name = "j" * 120
    install(long_name, "[kvrack]\nlong = long_plugin\n", {"long_plugin": backend_module("long", "nowhere:Layer")})
    page = run("backends").stdout
    assert page.count("j") == len(long_name)
    assert "…" not in page
    assert max(map(len, page.splitlines())) <= 80


def test_backends_as_json(install: Install) -> None:
    install("moonlit", "[kvrack]\nmoon = moonlit\n", {"moonlit": f"raise RuntimeError({REASON!r})\n"})
    data = json.loads(run("backends", "--json").stdout)
    rows = {row["name"]: row for row in data["backends"]}
    assert rows["dynamic"]["status"] == "ok"
    assert rows["dynamic"]["error"] is None
    assert rows["moon"]["status"] == "broken"
    assert REASON in rows["moon"]["error"]
    assert "quantized" in data["aliases"]


def test_backends_when_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrack.commands.backends", dict)
    assert "pip install kvrack-dynamic" in run("backends").stdout


# --- kvrack show ---------------------------------------------------------------------------------


def test_show_lists_settings_and_promises() -> None:
    page = " ".join(run("show", "dynamic").stdout.split())
    assert "growth float > 1.0, <= 4.0 1.25 factor by which memory grows when it is full" in page
    for promise, meaning in kvrack.Capabilities.describe().items():
        kept = "no" if promise == "stable_address" else "yes"
        assert f"{promise} {kept} {meaning}" in page


def test_show_with_a_setting() -> None:
    data = json.loads(run("show", "dynamic", "--set", "growth=1.5", "--json").stdout)
    assert data["given"] == {"growth": 1.5}
    assert data["settings"][0]["default"] == 1.25
    assert data["schema"]["properties"]["growth"]["type"] == "number"
    assert data["capabilities"]["lossless"] is True
    assert "set to" in run("show", "dynamic", "--set", "growth=1.5").stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["dynami"], "Did you mean 'dynamic'?"),
        (["dynamic", "--set", "grwth=2"], "unknown key 'grwth'. Valid keys: growth. Did you mean 'growth'?"),
        (["dynamic", "--set", "growth=fast"], "growth: input should be a valid number"),
        (["dynamic", "--set", "growth"], "expected key=value, got 'growth'"),
        (["dynamic", "--set", "=2"], "expected key=value, got '=2'"),
        (["quantized", "--set", "backend=zip"], "backend: expected one of quanto, hqq, fp8, got 'zip'"),
    ],
)
def test_show_refuses(args: list[str], said: str) -> None:
    assert said in refused("show", *args)


NEEDY = """
from kvrack import BackendConfig, BufferedLayer, Capabilities

class Config(BackendConfig):
    size: int
    kind: complex = 2j

class Layer(BufferedLayer):
    @property
    def capabilities(self):
        return Capabilities(grows=True, relative_error=0.01)

class Careless(BufferedLayer):
    def __init__(self, spec, config, context):
        raise ZeroDivisionError("careless")

    capabilities = None
"""


def test_show_of_a_backend_that_needs_settings(install: Install) -> None:
    modules = {"needy_plugin": backend_module("needy", "needy_layer:Layer", "needy_layer:Config"), "needy_layer": NEEDY}
    install("needy", "[kvrack]\nneedy = needy_plugin\n", modules)
    bare = run("show", "needy")
    assert bare.exit_code == 0
    assert "(required)" in bare.stdout
    assert "unknown, since it can't be built: config of cache backend 'needy': size: field required" in bare.stdout
    given = " ".join(run("show", "needy", "--set", "size=3").stdout.split())
    assert "relative_error 0.01 bound on |returned - given|" in given
    assert "lossless no" in given


def test_show_of_a_layer_that_cannot_be_built(install: Install) -> None:
    modules = {"careless": backend_module("careless", "careless_layer:Careless"), "careless_layer": NEEDY}
    install("careless", "[kvrack]\ncareless = careless\n", modules)
    done = run("show", "careless")
    assert done.exit_code == 0
    assert "unknown, since it can't be built: ZeroDivisionError: careless" in done.stdout


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 0}, "int >= 0"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "str or None"),
        ({"enum": [2, 4]}, "one of 2, 4"),
        ({"$ref": "#/$defs/Tier"}, "one of host, disk"),
        ({"type": "array", "items": {"type": "boolean"}}, "list of bool"),
        ({"const": "host"}, "host"),
        ({}, "any"),
    ],
)
def test_type_text(schema: dict[str, object], words: str) -> None:
    assert type_text(schema, {"Tier": {"enum": ["host", "disk"]}}) == words
