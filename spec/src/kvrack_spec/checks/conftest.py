"""Fixtures of the checks: the backend under test, and when a check is not run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from _pytest.mark import ParameterSet

import kvrack
from kvrack.backend import Capabilities
from kvrack_spec.plugin import REPORTER
from kvrack_spec.result import QUALITIES
from kvrack_spec.session import DECLINED, Conformance
from kvrack_spec.subject import KINDS, PROMISE_OF_KIND, SHAPES, Subject


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

    if "any_shape" in metafunc.fixturenames:
        metafunc.parametrize("any_shape", SHAPES, ids=str)
    if "declined" in metafunc.fixturenames:
        metafunc.parametrize("declined", list(_declined(conformance.subject())) or _none("nothing is declined"))
    if "inner" in metafunc.fixturenames:
        metafunc.parametrize("inner", list(_inner(conformance.subject())) or _none("it holds no other backend"))


def _declined(subject: Subject) -> Iterator[ParameterSet]:
    """Yield each promise that a kind of layer declines, with the kind, for those that a call refuses."""
    for kind in KINDS:
        if not subject.serves(kind):
            continue
        capabilities = subject.capabilities(kind)
        for promise in Capabilities.describe():
            if promise in QUALITIES or promise == "grows" or getattr(capabilities, promise):
                continue
            if promise in PROMISE_OF_KIND.values() and kind != "full":
                continue
            mark = pytest.mark.capability(promise)
            yield pytest.param((promise, kind), marks=mark, id=f"{promise}-{kind}")


def _none(reason: str) -> list[ParameterSet]:
    return [pytest.param(None, marks=pytest.mark.skip(reason=reason), id="none")]


def _inner(subject: Subject) -> Iterator[ParameterSet]:
    """Yield the keys of the config that name a backend to hold, each with every backend that loads.

    A key of cross-attention says nothing about layers of a plain decoder, which are what is built.
    """
    for key in inner_keys(subject):
        if key.startswith("cross"):
            continue
        for name, info in kvrack.backends().items():
            if info.error is None and not inner_keys(Subject(name)):
                yield pytest.param((key, name), id=f"{key}={name}")


def inner_keys(subject: Subject) -> list[str]:
    """Return the keys of a backend's config that take any name and whose default is that of an installed backend."""
    try:
        config = type(kvrack.resolve(subject.name, subject.settings).config)
    except kvrack.KvrackError:
        return []
    names = kvrack.backends()
    return [key for key, info in config.model_fields.items() if info.annotation is str and info.default in names]


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
    conformance = _conformance(request.config)
    subject = conformance.subject()
    if kind != "full" and not getattr(conformance.result.capabilities, PROMISE_OF_KIND[kind]):
        pytest.skip(f"{DECLINED}{PROMISE_OF_KIND[kind]}")
    if node.get_closest_marker("refusal") or node.get_closest_marker("capability") is None:
        return
    capabilities = subject.capabilities(kind)
    for mark in node.iter_markers("capability"):
        for promise in mark.args:
            if not getattr(capabilities, promise):
                pytest.skip(f"{DECLINED}{promise}")
