"""The pytest plugin: ``pytest --pyargs kvrack_spec --kvrack-backend NAME``.

Loaded in every pytest run of an environment that has kvrack-spec, so it imports neither torch nor
anything of the suite until a backend is named.
"""

from __future__ import annotations

import pytest

MARKERS = (
    "rule(*ids): the rules of SPEC.md that this check proves",
    "capability(*names): promises that this check proves; not run where one is declined",
    "refusal: this check proves that a declined promise is refused",
)
REPORTER = "kvrack-conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvrack", "conformance of kvrack cache backends")
    group.addoption("--kvrack-backend", metavar="NAME", help="backend to test, by its cache_implementation name")
    group.addoption(
        "--kvrack-set", action="append", default=[], metavar="KEY=VALUE", help="a key of the backend's config"
    )
    group.addoption(
        "--kvrack-device",
        action="append",
        default=[],
        metavar="DEVICE",
        help="device to test on; default: the CPU and the accelerator that torch finds",
    )
    group.addoption("--kvrack-quick", action="store_true", help="every check, with a few of its parameters each")
    group.addoption("--kvrack-json", metavar="FILE", help="write the result as JSON")
    group.addoption(
        "--kvrack-expected-failures",
        metavar="FILE",
        help="checks known to fail, one a line: 'test_crop.py::test_name  # reason'; one that passes is a failure",
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    if config.getoption("--kvrack-backend") is None:
        return
    from kvrack.errors import KvrackError
    from kvrack_spec.session import Conformance

    try:
        config.pluginmanager.register(Conformance.from_config(config), REPORTER)
    except KvrackError as error:
        raise pytest.UsageError(str(error)) from None
