"""Fixtures of the checks: the backend under test, and when a check is not run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvrack_spec.plugin import REPORTER
from kvrack_spec.session import DECLINED, Conformance
from kvrack_spec.subject import KINDS, PROMISE_OF_KIND, Subject

if TYPE_CHECKING:
    from kvrack.backend import Capabilities


def _conformance(config: pytest.Config) -> Conformance:
    found: Conformance | None = config.pluginmanager.get_plugin(REPORTER)
    if found is None:
        raise pytest.UsageError("the suite tests one backend: add --kvrack-backend NAME (see `kvrack backends`)")
    return found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    conformance = _conformance(metafunc.config)
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", conformance.result.devices, indirect=True)
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize("kind", KINDS)
    if "windowed" in metafunc.fixturenames:
        metafunc.parametrize("windowed", [kind for kind in KINDS if kind in PROMISE_OF_KIND])


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """The backend under test, on one device."""
    return _conformance(request.config).subject(request.param)


@pytest.fixture(autouse=True)
def _promised(request: pytest.FixtureRequest) -> None:
    """Skip a check whose promise, or whose kind of layer, is declined; it is refused elsewhere (B5)."""
    node = request.node
    parameters = node.callspec.params if hasattr(node, "callspec") else {}
    kind = parameters.get("kind", parameters.get("windowed", "full"))
    subject = _conformance(request.config).subject()
    if not subject.serves(kind):
        pytest.skip(f"{DECLINED}{PROMISE_OF_KIND[kind]}")
    if node.get_closest_marker("refusal"):
        return
    capabilities: Capabilities = subject.capabilities(kind)
    for mark in node.iter_markers("capability"):
        for promise in mark.args:
            if not getattr(capabilities, promise):
                pytest.skip(f"{DECLINED}{promise}")
