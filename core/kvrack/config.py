"""Name and dict -> validated backend config; the aliases among the names.

A backend's config is a frozen pydantic model. The dict a user gives is read, never changed, so the
same `cache_config` can be passed twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvrack.errors import InvalidConfig, closest, listed


class BackendConfig(BaseModel):
    """Base of every backend's config; itself the config of a backend without settings.

    Subclasses declare fields with a description each; ``kvrack show`` prints them. Every instance
    is frozen and refuses keys it does not know.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


class LayoutConfig(BackendConfig):
    """Base of a codec's config: which layout its codes are kept in."""

    layout: Literal["dynamic", "static"] = Field(
        default="dynamic", description="how codes are kept: in memory that grows, or preallocated"
    )
    max_cache_len: int | None = Field(
        default=None,
        ge=1,
        description="tokens to make room for with layout static; when unset, what generate needs",
    )

    @model_validator(mode="after")
    def _capacity_belongs_to_static(self) -> LayoutConfig:
        if self.layout != "static" and self.max_cache_len is not None:
            raise ValueError("max_cache_len is a key of layout static. Set layout to 'static', or leave it out")
        return self


KNOWN_DISTRIBUTIONS: dict[str, str] = {
    "dynamic": "kvrack-dynamic",
    "static": "kvrack-static",
    "offload": "kvrack-offload",
    "offloaded": "kvrack-offload",
    "offloaded_static": "kvrack-offload",
    "hqq": "kvrack-hqq",
    "quanto": "kvrack-quanto",
    "fp8": "kvrack-fp8",
    "mamba": "kvrack-mamba",
    "encoder-decoder": "kvrack-encoder-decoder",
}
"""Names of the project's own backends and what to install for each, for error texts."""

QUANTIZED = "quantized"
QUANTIZED_BACKENDS = ("quanto", "hqq", "fp8")
ALIASES: dict[str, str] = {QUANTIZED: "the backend that its key `backend` names (default quanto)"}
"""Names that resolve to another backend, with a line on what they mean."""


def resolve_alias(name: str, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the backend a name stands for, and its config without the alias's own keys.

    A name that is no alias comes back unchanged. Raises InvalidConfig when `backend` names none
    of the quantizing backends.
    """
    remaining = dict(config)
    if name != QUANTIZED:
        return name, remaining
    backend = remaining.pop("backend", QUANTIZED_BACKENDS[0])
    if backend not in QUANTIZED_BACKENDS:
        raise InvalidConfig(name, [f"backend: expected one of {listed(QUANTIZED_BACKENDS)}, got {backend!r}"])
    return backend, remaining


Config = TypeVar("Config", bound=BackendConfig)


def validate_config(name: str, config_class: type[Config], given: Mapping[str, Any]) -> Config:
    """Return the validated config of backend `name`.

    Raises InvalidConfig with every problem in one line: for an unknown key the valid keys and the
    closest one, for a value what was expected and what was given.
    """
    unnamed = [key for key in given if not isinstance(key, str)]
    if unnamed:
        raise InvalidConfig(name, [f"keys must be strings, got {unnamed[0]!r}"])
    try:
        return config_class.model_validate(dict(given))
    except ValidationError as error:
        own_keys = ["backend"] if name == QUANTIZED else []
        problems = [_problem(detail, config_class, own_keys) for detail in error.errors()]
        raise InvalidConfig(name, problems) from None


def _keys_within(config_class: type[BaseModel], path: list[str]) -> list[str]:
    """Return the keys of the config that `path` leads to from `config_class`."""
    for part in path:
        nested = config_class.model_fields[part].annotation
        if not (isinstance(nested, type) and issubclass(nested, BaseModel)):
            return []
        config_class = nested
    return list(config_class.model_fields)


def _problem(detail: Any, config_class: type[BaseModel], alias_keys: list[str]) -> str:
    path = [str(part) for part in detail["loc"]]
    key = ".".join(path)
    if detail["type"] == "extra_forbidden":
        valid_keys = sorted([*_keys_within(config_class, path[:-1]), *(alias_keys if len(path) == 1 else ())])
        text = f"unknown key {key!r}. Valid keys: {listed(valid_keys)}."
        match = closest(path[-1], valid_keys)
        return f"{text} Did you mean {match!r}?" if match else text
    message = detail["msg"][:1].lower() + detail["msg"][1:]
    return f"{key}: {message}, got {detail['input']!r}" if key else message


def parse_settings(pairs: Sequence[str]) -> dict[str, object]:
    """Return the config that ``["key=value", ...]`` writes, as ``--set`` takes it on the command line.

    A value is read as JSON where it parses, else as a string. Raises InvalidConfig for a pair
    without a key or an ``=``.
    """
    settings: dict[str, object] = {}
    for pair in pairs:
        key, separator, text = pair.partition("=")
        if not separator or not key:
            raise InvalidConfig("--set", [f"expected key=value, got {pair!r}"])
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings
