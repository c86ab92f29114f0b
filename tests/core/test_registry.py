"""Entry points to backends: every way a plugin can be broken, and what resolving and listing import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvrack
from kvrack import registry

BACKEND = """
from kvrack import Backend, hookimpl

@hookimpl
def kvrack_backend(name):
    return Backend(name={name!r}, summary="a fake", layer="{module}_layer:build", requires={requires!r})
"""


def module(name: str, backend: str | None = None, requires: tuple[str, ...] = ()) -> dict[str, str]:
    return {f"{name}.py": BACKEND.format(name=backend or name, module=name, requires=requires)}


def test_a_good_plugin_resolves_under_its_entry_points_name(site):
    site.install("good-dist", {"good": "good"}, module("good"), version="2.1")
    resolved = kvrack.resolve("good")
    assert resolved.backend.name == "good"
    assert type(resolved.config) is kvrack.BackendConfig
    info = kvrack.backends()["good"]
    assert info == kvrack.BackendInfo("good", "good-dist", "2.1", summary="a fake", error=None)


def test_one_module_may_serve_several_names(site):
    text = """
from kvrack import Backend, hookimpl

@hookimpl
def kvrack_backend(name):
    return Backend(name=name, summary=f"serves {name}", layer="nowhere:build")
"""
    site.install("pair", {"left": "pair_rack", "right": "pair_rack"}, {"pair_rack.py": text})
    assert kvrack.resolve("left").backend.summary == "serves left"
    assert kvrack.resolve("right").backend.summary == "serves right"


def test_unknown_name_lists_what_is_installed_and_the_closest(site):
    site.install("good-dist", {"goodly": "good"}, module("good", "goodly"))
    with pytest.raises(kvrack.UnknownBackend) as caught:
        kvrack.resolve("godly")
    text = str(caught.value)
    assert text.startswith("unknown cache backend 'godly'. Installed: ")
    assert "goodly" in text
    assert text.endswith("Did you mean 'goodly'?")


def test_unknown_name_near_an_alias_is_told_of_it():
    with pytest.raises(kvrack.UnknownBackend, match=r"Did you mean 'quantized'\?"):
        kvrack.resolve("quantised")


def test_known_name_that_is_not_installed_gives_the_pip_line(monkeypatch):
    monkeypatch.setattr(registry, "installed", lambda group="kvrack": {})
    with pytest.raises(kvrack.UnknownBackend) as caught:
        kvrack.resolve("hqq")
    assert str(caught.value) == (
        "unknown cache backend 'hqq'. Installed: none. 'hqq' is provided by kvrack-hqq: pip install kvrack-hqq"
    )


@pytest.mark.parametrize("name", [None, 3, b"dynamic"])
def test_a_name_that_is_no_string_is_unknown(name):
    with pytest.raises(kvrack.UnknownBackend, match="unknown cache backend"):
        kvrack.resolve(name)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("raise RuntimeError('boom')", RuntimeError),
        ("def broken(:", SyntaxError),
        ("import sys; sys.exit(3)", SystemExit),
        ("from kvrack import nothing_of_this_name", ImportError),
        ("import broken.submodule", ModuleNotFoundError),
    ],
)
def test_a_plugin_that_raises_while_imported_is_a_load_error_with_its_cause(site, text, cause):
    site.install("broken-dist", {"broken": "broken"}, {"broken.py": text})
    with pytest.raises(kvrack.BackendLoadError) as caught:
        kvrack.resolve("broken")
    assert isinstance(caught.value.__cause__, cause)
    assert str(caught.value).startswith(
        f"cache backend 'broken' (from broken-dist 1.0) is installed but failed to load: {cause.__name__}: "
    )


def test_a_module_that_is_not_there_is_a_load_error(site):
    site.install("broken-dist", {"broken": "not_there"}, {})
    with pytest.raises(kvrack.BackendLoadError, match="No module named 'not_there'"):
        kvrack.resolve("broken")


def test_a_malformed_entry_point_is_a_load_error(site):
    site.install("broken-dist", {"broken": "not a module!"}, {})
    with pytest.raises(kvrack.BackendLoadError, match="from broken-dist"):
        kvrack.resolve("broken")


def test_a_hook_that_raises_is_a_load_error(site):
    text = "from kvrack import hookimpl\n@hookimpl\ndef kvrack_backend(name):\n    raise KeyError('boom')\n"
    site.install("broken-dist", {"broken": "broken"}, {"broken.py": text})
    with pytest.raises(kvrack.BackendLoadError, match="KeyError: 'boom'"):
        kvrack.resolve("broken")


def test_an_import_of_a_library_that_is_not_installed_names_it(site):
    site.install("needy-dist", {"needy": "needy"}, {"needy.py": "import no_such_library.part"})
    with pytest.raises(kvrack.MissingDependency) as caught:
        kvrack.resolve("needy")
    assert str(caught.value) == (
        "cache backend 'needy' needs no_such_library, which is not installed. Run: pip install 'no_such_library'"
    )
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_the_pip_line_has_the_version_that_the_distribution_declares(site):
    site.install(
        "needy-dist", {"needy": "needy"}, {"needy.py": "import no_such_library"}, requires=["No-Such-Library>=2,<3"]
    )
    with pytest.raises(kvrack.MissingDependency) as caught:
        kvrack.resolve("needy")
    requirement = caught.value.requirement
    assert requirement in ("No-Such-Library<3,>=2", "No-Such-Library>=2,<3")
    assert str(caught.value).endswith(f"which is not installed. Run: pip install '{requirement}'")


def test_a_declared_requirement_that_is_absent_is_told_when_the_name_is_resolved(site):
    site.install("needy-dist", {"needy": "needy"}, module("needy", requires=("no-such-library>=2",)))
    with pytest.raises(kvrack.MissingDependency) as caught:
        kvrack.resolve("needy")
    assert str(caught.value) == (
        "cache backend 'needy' needs no-such-library>=2, which is not installed. Run: pip install 'no-such-library>=2'"
    )


def test_a_declared_requirement_that_is_too_old_says_what_is_installed(site):
    site.install("old-library", {}, {}, version="1.4")
    site.install("needy-dist", {"needy": "needy"}, module("needy", requires=("old-library>=2",)))
    with pytest.raises(kvrack.MissingDependency) as caught:
        kvrack.resolve("needy")
    assert str(caught.value) == (
        "cache backend 'needy' needs old-library>=2, version 1.4 is installed. Run: pip install 'old-library>=2'"
    )


def test_a_declared_requirement_that_is_met_resolves(site):
    site.install("new-library", {}, {}, version="2.0rc1")
    site.install("needy-dist", {"needy": "needy"}, module("needy", requires=("new-library>=1.9",)))
    assert kvrack.resolve("needy").backend.name == "needy"


def test_a_requirement_that_pip_could_not_read_is_the_plugins_fault(site):
    site.install("needy-dist", {"needy": "needy"}, module("needy", requires=("new library, 2",)))
    with pytest.raises(kvrack.InvalidPlugin, match="'new library, 2' is not a requirement"):
        kvrack.resolve("needy")


def test_one_name_from_two_distributions_names_both_and_picks_neither(site):
    site.install("first-dist", {"twice": "first"}, module("first", "twice"), version="1.0")
    site.install("second-dist", {"twice": "second"}, module("second", "twice"), version="2.0")
    with pytest.raises(kvrack.DuplicateBackend) as caught:
        kvrack.resolve("twice")
    assert str(caught.value) == (
        "cache backend 'twice' is offered by more than one distribution: first-dist 1.0 and second-dist 2.0. "
        "Keep one: pip uninstall first-dist or pip uninstall second-dist"
    )
    info = kvrack.backends()["twice"]
    assert isinstance(info.error, kvrack.DuplicateBackend)
    assert (info.distribution, info.version) == ("first-dist, second-dist", "1.0, 2.0")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "def kvrack_backend(name, **kwargs):\n    return None",
            r"hook kvrack_backend swallows arguments \(\*\*kwargs\); name each of them",
        ),
        (
            "def kvrack_backend(*args):\n    return None",
            r"hook kvrack_backend swallows arguments \(\*args\); name each of them",
        ),
        ("def kvrack_backend(name):\n    return 'a string'", "kvrack_backend returned str, not a Backend"),
        ("def kvrack_backend(name):\n    return None", "it has no kvrack_backend hook that answers to this name"),
        ("def kvrack_bakend(name):\n    return None", "unknown hook 'kvrack_bakend'"),
        ("def kvrack_backend(name, torch):\n    return None", "torch"),
        (
            "def kvrack_backend(name):\n    return Backend(name='other', summary='', layer='a:b')",
            "kvrack_backend returned the backend 'other' for this name",
        ),
    ],
)
def test_a_plugin_that_does_not_keep_the_contract_is_refused(site, text, reason):
    site.install("odd-dist", {"odd": "odd"}, {"odd.py": f"from kvrack import Backend, hookimpl\n@hookimpl\n{text}\n"})
    with pytest.raises(kvrack.InvalidPlugin, match=reason) as caught:
        kvrack.resolve("odd")
    assert str(caught.value).startswith("cache backend 'odd' (from odd-dist 1.0) is not a valid plugin: ")
    assert "\n" not in str(caught.value)


def test_a_module_without_any_hook_is_refused(site):
    site.install("odd-dist", {"odd": "odd"}, {"odd.py": ""})
    with pytest.raises(kvrack.InvalidPlugin, match="it has no kvrack_backend hook that answers to this name"):
        kvrack.resolve("odd")


def test_a_config_that_is_no_backend_config_is_refused(site):
    text = module("odd")["odd.py"].replace('summary="a fake"', 'summary="", config="odd:Config"') + "class Config: ..."
    site.install("odd-dist", {"odd": "odd"}, {"odd.py": text})
    with pytest.raises(kvrack.InvalidPlugin, match="its config must be a subclass of"):
        kvrack.resolve("odd")


def test_a_config_whose_module_needs_a_missing_library_names_it(site):
    text = module("needy")["needy.py"].replace('summary="a fake"', 'summary="", config="needy_config:Config"')
    site.install("needy-dist", {"needy": "needy"}, {"needy.py": text, "needy_config.py": "import no_such_library"})
    with pytest.raises(kvrack.MissingDependency, match="needs no_such_library, which is not installed"):
        kvrack.resolve("needy")


@pytest.mark.parametrize(
    ("builder", "reason"),
    [
        (
            "def build(spec, config, context, **kwargs):\n    return None",
            r"its builder swallows arguments \(\*\*kwargs\); name spec, config and context",
        ),
        ("def build(*args):\n    return None", r"its builder swallows arguments \(\*args\)"),
        ("def build(spec, config, context):\n    return 5", "its builder returned int, not a CacheLayer"),
    ],
)
def test_a_builder_that_does_not_keep_the_contract_is_refused_when_built(site, builder, reason):
    site.install("good-dist", {"good": "good"}, module("good") | {"good_layer.py": builder})
    with pytest.raises(kvrack.InvalidPlugin, match=reason):
        kvrack.create_cache("good", kvrack.ModelSpec.uniform(1))


def test_listing_survives_every_broken_plugin(site):
    site.install("good-dist", {"good": "good"}, module("good"))
    site.install("needy-dist", {"needy": "needy"}, {"needy.py": "import no_such_library"})
    site.install("broken-dist", {"broken": "broken"}, {"broken.py": "raise RuntimeError('boom')"})
    site.install("exits-dist", {"exits": "exits"}, {"exits.py": "raise SystemExit(1)"})
    site.install("odd-dist", {"odd": "odd"}, {"odd.py": ""})
    site.install("first-dist", {"twice": "first"}, module("first", "twice"))
    site.install("second-dist", {"twice": "second"}, module("second", "twice"))
    listing = kvrack.backends()
    errors = {name: type(info.error) for name, info in listing.items() if info.error is not None}
    assert errors == {
        "needy": kvrack.MissingDependency,
        "broken": kvrack.BackendLoadError,
        "exits": kvrack.BackendLoadError,
        "odd": kvrack.InvalidPlugin,
        "twice": kvrack.DuplicateBackend,
    }
    assert listing["good"].error is None
    assert list(listing) == sorted(listing)
    assert kvrack.resolve("good").backend.name == "good"


def test_commands_and_backends_are_groups_of_their_own(site):
    site.install("tools-dist", {"tool": "tools"}, {"tools.py": ""}, group=registry.COMMAND_GROUP)
    assert "tool" in registry.installed(registry.COMMAND_GROUP)
    assert "tool" not in kvrack.backends()


# --- what is imported, seen from a fresh interpreter ----------------------------------------------

WRAPPER = {
    "wraps/__init__.py": BACKEND.format(name="wraps", module="wraps.wraps", requires=()),
    "wraps/layer.py": "import wrapped_library, torch",
    "wrapped_library.py": "",
}


def modules_after(statement: str, *folders: Path) -> set[str]:
    """Return the names in sys.modules after `statement` ran in a fresh interpreter."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_kvrack_imports_no_torch():
    names = modules_after("import kvrack")
    assert "kvrack.registry" in names
    assert names.isdisjoint({"torch", "pydantic", "safetensors", "transformers", "kvrack.layer"})


def test_listing_imports_neither_torch_nor_a_wrapped_library_nor_a_layer(site, plain):
    site.install("wraps-dist", {"wraps": "wraps"}, WRAPPER)
    names = modules_after("import kvrack; assert {'wraps', 'plain'} <= set(kvrack.backends())", site.folder, plain)
    assert {"wraps", "plain_rack"} <= names
    assert names.isdisjoint({"torch", "wrapped_library", "wraps.layer", "plain_rack.layer"})


def test_listing_names_alone_imports_no_plugin(site, plain):
    site.install("wraps-dist", {"wraps": "wraps"}, WRAPPER)
    statement = "from kvrack import registry; assert {'wraps', 'plain'} <= set(registry.installed())"
    names = modules_after(statement, site.folder, plain)
    assert names.isdisjoint({"torch", "wraps", "plain_rack"})


def test_resolving_one_name_imports_one_plugin(site, plain):
    site.install("wraps-dist", {"wraps": "wraps"}, WRAPPER)
    names = modules_after("import kvrack; kvrack.resolve('wraps')", site.folder, plain)
    assert "wraps" in names
    assert names.isdisjoint({"torch", "wrapped_library", "wraps.layer", "plain_rack"})
