"""``kvrack conform NAME``: run the suite against one backend, from any directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvrack.config import parse_settings
from kvrack.errors import KvrackError
from kvrack_spec.plugin import REPORTER
from kvrack_spec.result import Result

HERE = Path(__file__).parent


class _Keep:
    """Keeps the result of the session, which ends before pytest.main returns."""

    result: Result | None = None

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        conformance = config.pluginmanager.get_plugin(REPORTER)
        self.result = conformance.result if conformance is not None else None


def pytest_arguments(
    name: str,
    settings: tuple[str, ...] = (),
    devices: tuple[str, ...] = (),
    json_path: str | None = None,
    expected_failures: str | None = None,
    keyword: str | None = None,
    quick: bool = False,
) -> list[str]:
    """Return pytest's arguments for a run of the suite that no configuration around it can change."""
    arguments = [str(HERE / "checks"), "-c", str(HERE / "conform.ini"), "--rootdir", str(HERE)]
    arguments += ["-o", "addopts=", "-p", "kvrack_spec", "-p", "no:cacheprovider", "-qq", "--tb=no", "-rN"]
    arguments += ["--disable-warnings", f"--kvrack-backend={name}"]
    arguments += [f"--kvrack-set={pair}" for pair in settings]
    arguments += [f"--kvrack-device={device}" for device in devices]
    if json_path is not None:
        arguments.append(f"--kvrack-json={Path(json_path).resolve()}")
    if expected_failures is not None:
        arguments.append(f"--kvrack-expected-failures={Path(expected_failures).resolve()}")
    if quick:
        arguments.append("--kvrack-quick")
    if keyword is not None:
        arguments += ["-k", keyword]
    return arguments


def run_conformance(arguments: list[str]) -> tuple[int, Result | None]:
    """Run pytest in this process; return its exit code and the result, None where it couldn't start."""
    keep = _Keep()
    code = int(pytest.main(arguments, plugins=[keep]))
    return code, keep.result


def expect_conformance(name: str, settings: tuple[str, ...] = (), quick: bool = False) -> None:
    """Raise AssertionError, with the report, unless the backend conforms: what a plugin's own test calls.

    Runs in a process of its own, since the suite is a pytest session.

    Args:
        name: of the backend.
        settings: keys of its config, ``"key=value"`` each.
        quick: every check, with a few of its parameters each.
    """
    command = [sys.executable, "-m", "pytest", *pytest_arguments(name, settings, quick=quick)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "CONFORMS" in done.stdout
    assert "DOES NOT" not in done.stdout


@click.command(name="conform")
@click.argument("name")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A key of the backend's config.")
@click.option("--device", "devices", multiple=True, help="Device to test on. Default: CPU and accelerator.")
@click.option("--json", "json_path", type=click.Path(dir_okay=False), help="Write the result as JSON.")
@click.option(
    "--expected-failures",
    type=click.Path(dir_okay=False),
    help="Checks known to fail, one a line: 'test_crop.py::test_name  # reason'.",
)
@click.option("--quick", is_flag=True, help="Every check, with a few of its parameters each.")
@click.option("-k", "keyword", metavar="EXPR", help="Run only the checks that match, as pytest's -k.")
@click.pass_context
def conform(
    context: click.Context,
    name: str,
    settings: tuple[str, ...],
    devices: tuple[str, ...],
    json_path: str | None,
    expected_failures: str | None,
    keyword: str | None,
    quick: bool,
) -> None:
    """Say whether the backend NAME keeps the contract, rule by rule.

    Exit code 0: it conforms. 1: it does not. 2: it can't be loaded.
    """
    try:
        _check_inputs(name, settings, devices, expected_failures)
    except KvrackError as error:
        click.echo(f"error: {error}", err=True)
        context.exit(2)
    arguments = pytest_arguments(name, settings, devices, json_path, expected_failures, keyword, quick)
    code, result = run_conformance(arguments)
    context.exit(0 if code == 0 and result is not None and result.conforms else 1)


def _check_inputs(
    name: str, settings: tuple[str, ...], devices: tuple[str, ...], expected_failures: str | None
) -> None:
    import torch

    from kvrack.errors import InvalidConfig
    from kvrack_spec.expected import read_expected_failures
    from kvrack_spec.session import open_backend

    open_backend(name, parse_settings(settings))
    if expected_failures is not None:
        read_expected_failures(expected_failures)
    for device in devices:
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0]
            raise InvalidConfig("--device", [f"{device!r} can't be used here: {first}"]) from None
