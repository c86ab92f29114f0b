"""The words of every error: what was named, expected and seen, and the remedy."""

from __future__ import annotations

import pytest

import kvrack
from kvrack.errors import closest, listed

TEXTS = [
    (
        kvrack.UnknownBackend("dynamik", ["dynamic", "static"]),
        "unknown cache backend 'dynamik'. Installed: dynamic, static. Did you mean 'dynamic'?",
    ),
    (kvrack.UnknownBackend("banana", ["dynamic"]), "unknown cache backend 'banana'. Installed: dynamic."),
    (kvrack.UnknownBackend("banana", []), "unknown cache backend 'banana'. Installed: none."),
    (
        kvrack.UnknownBackend("hqq", ["dynamic"], "kvrack-hqq"),
        "unknown cache backend 'hqq'. Installed: dynamic. 'hqq' is provided by kvrack-hqq: pip install kvrack-hqq",
    ),
    (
        kvrack.UnknownBackend("quantised", ["dynamic"], aliases=["quantized"]),
        "unknown cache backend 'quantised'. Installed: dynamic. Did you mean 'quantized'?",
    ),
    (
        kvrack.BackendLoadError("hqq", "kvrack-hqq 0.1.0", RuntimeError("boom")),
        "cache backend 'hqq' (from kvrack-hqq 0.1.0) is installed but failed to load: RuntimeError: boom",
    ),
    (
        kvrack.InvalidPlugin("hqq", "kvrack-hqq 0.1.0", "it has no hook"),
        "cache backend 'hqq' (from kvrack-hqq 0.1.0) is not a valid plugin: it has no hook",
    ),
    (
        kvrack.MissingDependency("hqq", "hqq>=0.2"),
        "cache backend 'hqq' needs hqq>=0.2, which is not installed. Run: pip install 'hqq>=0.2'",
    ),
    (
        kvrack.MissingDependency("hqq", "hqq>=0.2", "0.1"),
        "cache backend 'hqq' needs hqq>=0.2, version 0.1 is installed. Run: pip install 'hqq>=0.2'",
    ),
    (
        kvrack.DuplicateBackend("hqq", ["kvrack-hqq 0.1.0", "other 2"]),
        "cache backend 'hqq' is offered by more than one distribution: kvrack-hqq 0.1.0 and other 2. "
        "Keep one: pip uninstall kvrack-hqq or pip uninstall other",
    ),
    (
        kvrack.InvalidConfig("hqq", ["nbits: expected 4", "unknown key 'x'"]),
        "config of cache backend 'hqq': nbits: expected 4; unknown key 'x'",
    ),
    (
        kvrack.UnsupportedOperation("hqq", "crop(-3) [crops]", "Call reset()"),
        "hqq: crop(-3) [crops] is not supported. Call reset()",
    ),
    (
        kvrack.CapacityExceeded(64, 60, 8),
        "cache capacity is 64 tokens, 60 are held and 8 more were asked for. "
        "Build the cache with max_cache_len=68 or more",
    ),
]


@pytest.mark.parametrize(("error", "text"), TEXTS, ids=lambda value: type(value).__name__)
def test_text(error, text):
    assert str(error) == text


@pytest.mark.parametrize(
    ("error_class", "builtin"),
    [
        (kvrack.UnknownBackend, ValueError),
        (kvrack.InvalidPlugin, TypeError),
        (kvrack.MissingDependency, ImportError),
        (kvrack.InvalidConfig, ValueError),
        (kvrack.UnsupportedOperation, NotImplementedError),
        (kvrack.CapacityExceeded, ValueError),
        (kvrack.ShapeMismatch, ValueError),
        (kvrack.SnapshotError, ValueError),
    ],
)
def test_callers_that_catch_the_builtin_error_catch_ours(error_class, builtin):
    assert issubclass(error_class, builtin)
    assert issubclass(error_class, kvrack.KvrackError)


def test_a_load_error_has_the_plugins_own_exception_as_its_cause():
    cause = RuntimeError("boom")
    assert kvrack.BackendLoadError("hqq", "kvrack-hqq 0.1.0", cause).__cause__ is cause


def test_errors_keep_what_they_were_made_of():
    capacity = kvrack.CapacityExceeded(64, 60, 8)
    assert (capacity.capacity, capacity.held, capacity.asked) == (64, 60, 8)
    refusal = kvrack.UnsupportedOperation("hqq", "crop", "Call reset()")
    assert (refusal.backend, refusal.operation, refusal.remedy) == ("hqq", "crop", "Call reset()")
    assert kvrack.DuplicateBackend("hqq", ["a 1", "b 2"]).providers == ("a 1", "b 2")


def test_closest_and_listed():
    assert closest("dynamik", ["static", "dynamic"]) == "dynamic"
    assert closest("xyz", ["static", "dynamic"]) is None
    assert listed(["a", "b"]) == "a, b"
    assert listed([]) == "none"
