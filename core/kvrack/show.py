"""What ``kvrack show NAME`` says: a backend's settings, from its pydantic schema, and what its layers promise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from kvrack.backend import Capabilities
from kvrack.config import ALIASES, QUANTIZED, QUANTIZED_BACKENDS, BackendConfig, resolve_alias, validate_config
from kvrack.errors import InvalidConfig, KvrackError
from kvrack.model import ModelSpec
from kvrack.registry import Resolved, installed, load_backend, load_config_class

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Setting:
    """One key of a backend's config.

    Attributes:
        key: as in `cache_config`.
        type: what values it takes, in words.
        required: whether it must be given.
        default: what it is when not given, None where it must be.
        meaning: the description its author gave it.
    """

    key: str
    type: str
    required: bool
    default: Any
    meaning: str


@dataclass(frozen=True)
class Description:
    """Everything ``kvrack show`` prints.

    Attributes:
        name: the name asked for.
        backend: the backend it stands for; another one where `name` is an alias.
        distribution: what offers the backend.
        version: of the distribution.
        summary: the backend's own line.
        alias: what the alias means, None where `name` is none.
        settings: the config's keys.
        given: the settings that were asked to be shown.
        schema: the config's JSON schema.
        capabilities: what a full-attention layer built with `given` promises, None when it can't be built.
        problem: why it can't be built, None when it can.
    """

    name: str
    backend: str
    distribution: str
    version: str
    summary: str
    alias: str | None
    settings: tuple[Setting, ...]
    given: Mapping[str, object]
    schema: JsonSchemaValue
    capabilities: Capabilities | None
    problem: str | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for ``--json``."""
        return asdict(self)


class _LenientSchema(GenerateJsonSchema):
    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        # A key of a type that JSON has no form for is still a key to list.
        return {}


def describe(name: str, settings: Mapping[str, object]) -> Description:
    """Return what is to be said of backend or alias `name`, built with `settings`.

    Raises what `kvrack.resolve` raises; but where no settings are given and the backend needs some,
    the description says so.
    """
    target, remaining = resolve_alias(name, settings)
    backend = load_backend(target)
    config_class = load_config_class(backend)
    schema = config_class.model_json_schema(schema_generator=_LenientSchema)
    capabilities, problem = None, None
    try:
        config = validate_config(name, config_class, remaining)
    except InvalidConfig as error:
        if settings:
            raise
        problem = str(error)
    else:
        try:
            capabilities = _promises(Resolved(backend, config), name)
        except KvrackError as error:
            problem = str(error)
        except Exception as error:
            # A stranger's layer may raise anything while it is built, and its settings are to be shown all the same.
            problem = f"{type(error).__name__}: {error}"
    dist = installed()[target][0].dist
    own = (_alias_key(),) if name == QUANTIZED else ()
    return Description(
        name=name,
        backend=target,
        distribution=dist.name if dist is not None else "",
        version=dist.version if dist is not None else "",
        summary=backend.summary,
        alias=ALIASES.get(name),
        settings=(*own, *_settings(config_class, schema)),
        given=dict(settings),
        schema=schema,
        capabilities=capabilities,
        problem=problem,
    )


def _promises(resolved: Resolved, name: str) -> Capabilities:
    from kvrack.cache import Cache

    return Cache(resolved, ModelSpec.uniform(1), name).capabilities


def _alias_key() -> Setting:
    choices = ", ".join(QUANTIZED_BACKENDS)
    return Setting("backend", f"one of {choices}", False, QUANTIZED_BACKENDS[0], "which backend the name stands for")


def _settings(config_class: type[BackendConfig], schema: JsonSchemaValue) -> list[Setting]:
    definitions = schema.get("$defs", {})
    properties = schema.get("properties", {})
    found = []
    for key, field in config_class.model_fields.items():
        required = field.is_required()
        default = None if required else field.get_default(call_default_factory=True, validated_data={})
        kind = type_text(properties.get(field.alias or key, {}), definitions)
        found.append(Setting(field.alias or key, kind, required, default, field.description or ""))
    return found


_WORDS = {"integer": "int", "number": "float", "string": "str", "boolean": "bool", "null": "None", "object": "dict"}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


def type_text(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return in Python's words what values a JSON schema allows, as in ``float > 1.0, <= 4.0``.

    Args:
        schema: of one key.
        definitions: the ``$defs`` that its references point into.
    """
    if "$ref" in schema:
        return type_text(definitions.get(schema["$ref"].rpartition("/")[2], {}), definitions)
    if choices := schema.get("anyOf", schema.get("oneOf")):
        return " or ".join(type_text(choice, definitions) for choice in choices)
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    if "const" in schema:
        return str(schema["const"])
    if schema.get("type") == "array":
        inner = type_text(schema.get("items", {}), definitions)
        return f"list of {inner}"
    word = _WORDS.get(schema.get("type", ""), "any")
    bounds = ", ".join(f"{sign} {schema[bound]}" for bound, sign in _BOUNDS.items() if bound in schema)
    return f"{word} {bounds}" if bounds else word


def _value_text(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return str(value)


def render(description: Description, console: Console) -> None:
    """Print a description for a reader."""
    from kvrack.commands import table

    console.print(description.name, style="bold", end="")
    console.print(f"  {description.distribution} {description.version}")
    if description.alias is not None:
        console.print(f"alias: {description.alias}; here {description.backend}")
    console.print(description.summary)

    console.print("\nsettings (--set key=value, or cache_config={...})", style="bold")
    if description.settings:
        columns = ["key", "type", "default", "meaning"]
        rows = table(*columns, *(["set to"] if description.given else []))
        for setting in description.settings:
            default = "(required)" if setting.required else _value_text(setting.default)
            given = description.given.get(setting.key)
            shown = [_value_text(given) if setting.key in description.given else ""] if description.given else []
            rows.add_row(setting.key, setting.type, default, setting.meaning, *shown)
        console.print(rows)
    else:
        console.print("none")

    console.print("\npromises of a full-attention layer built so", style="bold")
    if description.capabilities is None:
        console.print(f"unknown, since it can't be built: {description.problem}", soft_wrap=True)
        if not description.given:
            console.print("Give the settings it needs with --set key=value.")
        return
    promises = table("promise", "kept", "meaning")
    for name, meaning in Capabilities.describe().items():
        promises.add_row(name, "yes" if getattr(description.capabilities, name) else "no", meaning)
    if not description.capabilities.lossless:
        promises.add_row(
            "relative_error",
            f"{description.capabilities.relative_error:g}",
            "bound on |returned - given| relative to the largest magnitude in the same row, head and update",
        )
    console.print(promises)
