"""Name and dict to a validated config: unknown keys, wrong values, the alias, and the dict left alone."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import Field, ValidationError

import kvrack
from kvrack.config import BackendConfig, resolve_alias, validate_config


class Inner(BackendConfig):
    depth: int = 1


class Shape(BackendConfig):
    growth: float = Field(default=1.25, gt=1.0, le=4.0)
    nbits: Literal[2, 4] = 4
    name: str = "x"
    inner: Inner = Inner()


def problem(given: dict) -> str:
    with pytest.raises(kvrack.InvalidConfig) as caught:
        validate_config("shape", Shape, given)
    return str(caught.value)


def test_defaults_and_values():
    assert validate_config("shape", Shape, {}) == Shape()
    assert validate_config("shape", Shape, {"nbits": 2, "inner": {"depth": 3}}) == Shape(nbits=2, inner=Inner(depth=3))


def test_an_unknown_key_lists_the_valid_ones_and_the_closest():
    assert problem({"growht": 2.0}) == (
        "config of cache backend 'shape': unknown key 'growht'. Valid keys: growth, inner, name, nbits. "
        "Did you mean 'growth'?"
    )


def test_an_unknown_key_far_from_all_others_suggests_none():
    assert problem({"banana": 1}) == (
        "config of cache backend 'shape': unknown key 'banana'. Valid keys: growth, inner, name, nbits."
    )


def test_a_backend_without_settings_says_that_it_has_none():
    with pytest.raises(kvrack.InvalidConfig) as caught:
        validate_config("bare", BackendConfig, {"growth": 2})
    assert str(caught.value) == "config of cache backend 'bare': unknown key 'growth'. Valid keys: none."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"growth": "much"}, "growth: input should be a valid number, unable to parse string as a number, got 'much'"),
        ({"growth": 0.5}, "growth: input should be greater than 1, got 0.5"),
        ({"growth": None}, "growth: input should be a valid number, got None"),
        ({"nbits": 3}, "nbits: input should be 2 or 4, got 3"),
        ({"name": 3}, "name: input should be a valid string, got 3"),
        (
            {"inner": {"depth": "deep"}},
            "inner.depth: input should be a valid integer, unable to parse string as an integer, got 'deep'",
        ),
    ],
)
def test_a_wrong_value_names_the_key_what_was_expected_and_what_was_given(given, expected):
    assert problem(given) == f"config of cache backend 'shape': {expected}"


def test_an_unknown_key_of_a_nested_config_lists_the_nested_keys():
    assert problem({"inner": {"dept": 2}}) == (
        "config of cache backend 'shape': unknown key 'inner.dept'. Valid keys: depth. Did you mean 'depth'?"
    )


def test_every_problem_is_told_at_once():
    with pytest.raises(kvrack.InvalidConfig) as caught:
        validate_config("shape", Shape, {"growth": 9, "banana": 1})
    assert len(caught.value.problems) == 2
    assert "growth: input should be less than or equal to 4, got 9" in str(caught.value)
    assert "unknown key 'banana'" in str(caught.value)


def test_a_key_that_is_no_string_is_refused():
    assert problem({3: 4}) == "config of cache backend 'shape': keys must be strings, got 3"


def test_a_config_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Shape().growth = 2.0


@pytest.mark.parametrize("config", [5, "growth=2", [("growth", 2)]])
def test_a_cache_config_that_is_no_dict_is_refused(plain, config):
    with pytest.raises(kvrack.InvalidConfig, match=f"expected a dict of keys, got {type(config).__name__}"):
        kvrack.resolve("plain", config)


def test_the_dict_given_is_read_and_never_changed(plain):
    given = {"growth": 1.5}
    first, second = kvrack.resolve("plain", given), kvrack.resolve("plain", given)
    assert given == {"growth": 1.5}
    assert first.config == second.config
    assert first.config.growth == 1.5


# --- the alias ------------------------------------------------------------------------------------

QUANTIZER = """
from kvrack import Backend, BackendConfig, hookimpl

class Config(BackendConfig):
    nbits: int = 4

@hookimpl
def kvrack_backend(name):
    return Backend(name=name, summary="", layer="nowhere:build", config="{module}:Config")
"""


@pytest.fixture
def fp8(site, monkeypatch):
    """A fake backend under one of the names that `quantized` stands for, whatever is installed."""
    from kvrack import registry

    site.install("fake-fp8", {"fake": "fake_fp8"}, {"fake_fp8.py": QUANTIZER.format(module="fake_fp8")})
    offered = registry.installed()["fake"][0]
    renamed = type(offered)("fp8", offered.value, offered.group)._for(offered.dist)
    monkeypatch.setattr(registry, "installed", lambda group="kvrack": {"fp8": (renamed,)})


def test_quantized_resolves_to_the_backend_it_names(fp8):
    given = {"backend": "fp8", "nbits": 2}
    resolved = kvrack.resolve("quantized", given)
    assert resolved.backend.name == "fp8"
    assert resolved.config.nbits == 2
    assert given == {"backend": "fp8", "nbits": 2}


def test_quantized_stands_for_quanto_by_default():
    assert resolve_alias("quantized", {"nbits": 2}) == ("quanto", {"nbits": 2})


def test_quantized_refuses_a_backend_that_does_not_quantize():
    with pytest.raises(kvrack.InvalidConfig) as caught:
        kvrack.resolve("quantized", {"backend": "dynamic"})
    assert str(caught.value) == (
        "config of cache backend 'quantized': backend: expected one of quanto, hqq, fp8, got 'dynamic'"
    )


def test_a_misspelt_key_of_quantized_is_told_of_the_aliass_own_key(fp8):
    with pytest.raises(kvrack.InvalidConfig) as caught:
        kvrack.resolve("quantized", {"backend": "fp8", "bakend": "hqq"})
    assert str(caught.value) == (
        "config of cache backend 'quantized': unknown key 'bakend'. Valid keys: backend, nbits. Did you mean 'backend'?"
    )


def test_quantized_names_the_distribution_to_install_when_its_backend_is_missing(monkeypatch):
    from kvrack import registry

    monkeypatch.setattr(registry, "installed", lambda group="kvrack": {})
    with pytest.raises(kvrack.UnknownBackend, match="'quanto' is provided by kvrack-quanto: pip install kvrack-quanto"):
        kvrack.resolve("quantized")


def test_a_name_that_is_no_alias_keeps_its_keys():
    assert resolve_alias("hqq", {"backend": "fp8"}) == ("hqq", {"backend": "fp8"})
