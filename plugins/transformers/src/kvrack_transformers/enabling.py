"""enable() and disable(): every installed name in `generate` and `GenerationConfig`.

Three places in transformers are replaced, and put back exactly: the tuple of accepted names, the
validation that reads it, and the step of `generate` that builds the cache.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import configuration_utils
from transformers.generation.configuration_utils import GenerationMode

import kvrack
from kvrack.config import ALIASES, KNOWN_DISTRIBUTIONS, resolve_alias
from kvrack.registry import installed
from kvrack_transformers import attention
from kvrack_transformers.creating import AnyCache, create_cache
from kvrack_transformers.versions import VALIDATE_TAKES_USER_ATTRIBUTES, cache_argument

logger = logging.getLogger("kvrack.transformers")

PAGED = "paged"
"""transformers' name for continuous batching, which never builds a cache here."""


@dataclass(frozen=True)
class _Originals:
    """What transformers had before `enable`."""

    names: tuple[str, ...]
    validate: Callable[..., Any]
    prepare: Callable[..., Any]


_originals: _Originals | None = None
_built: ContextVar[list[AnyCache] | None] = ContextVar("built", default=None)
_warned: set[str] = set()


@contextlib.contextmanager
def noting_caches() -> Iterator[list[AnyCache]]:
    """Give a list of the caches that generate builds by a kvrack name from now on, in this thread."""
    built: list[AnyCache] = []
    token = _built.set(built)
    try:
        yield built
    finally:
        _built.reset(token)


def note_cache(cache: AnyCache) -> None:
    """Add a cache that was built for generate to the list that `noting_caches` gave, if it did."""
    if (built := _built.get()) is not None:
        built.append(cache)


def is_enabled() -> bool:
    """Return whether transformers accepts kvrack's names."""
    return _originals is not None


def enable() -> None:
    """Make ``model.generate(cache_implementation=NAME, cache_config={...})`` and `GenerationConfig` accept
    every installed name. Calling it again does nothing.

    A name that both kvrack and transformers have means kvrack's. One that only transformers has
    still means its own, with one warning where kvrack has a backend for it that isn't installed.
    Without `cache_implementation`, generate does what it always did. Models may also take
    ``attn_implementation="kvrack"``; see `kvrack_transformers.attention`.
    """
    global _originals
    if _originals is not None:
        return
    _originals = _Originals(
        names=configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        validate=GenerationConfig.validate,
        prepare=GenerationMixin._prepare_cache_for_generation,
    )
    _replace(_validate, _prepare_cache_for_generation)
    attention.register()


def disable() -> None:
    """Put transformers back as it was before `enable`. Caches already built stay usable."""
    global _originals
    if _originals is None:
        return
    _accept(_originals.names)
    _replace(_originals.validate, _originals.prepare)
    attention.unregister()
    _originals = None


def _replace(validate: Callable[..., Any], prepare: Callable[..., Any]) -> None:
    GenerationConfig.validate = validate  # type: ignore[method-assign]
    GenerationMixin._prepare_cache_for_generation = prepare  # type: ignore[method-assign]


def _accept(names: tuple[str, ...]) -> None:
    configuration_utils.ALL_CACHE_IMPLEMENTATIONS = names  # type: ignore[assignment]


def _serves(name: str, config: Mapping[str, Any] | None) -> bool:
    """Return whether kvrack answers to `name`; False where transformers' own cache does.

    Raises UnknownBackend where neither does, and InvalidConfig for an alias whose config names none that it stands for.
    """
    assert _originals is not None
    if not isinstance(name, str):
        raise kvrack.UnknownBackend(str(name), list(installed()))
    target = name
    if name in ALIASES and name not in installed():
        if not isinstance(config, Mapping | None):
            raise kvrack.InvalidConfig(name, [f"expected a dict of keys, got {type(config).__name__}"])
        target, _ = resolve_alias(name, config or {})
    if target in installed():
        return True
    if name in _originals.names or name == PAGED:
        if target in KNOWN_DISTRIBUTIONS and name not in _warned:
            _warned.add(name)
            logger.warning(
                "cache_implementation=%r: transformers' own cache serves. For kvrack's: pip install %s",
                name,
                KNOWN_DISTRIBUTIONS[target],
            )
        return False
    raise kvrack.UnknownBackend(name, list(installed()), KNOWN_DISTRIBUTIONS.get(name))


def _validate(self: GenerationConfig, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
    """Validate as transformers does, and a kvrack name with its config as kvrack does."""
    assert _originals is not None
    name = self.cache_implementation
    if name is not None and _serves(name, self.cache_config):
        kvrack.resolve(name, self.cache_config)
        if name not in configuration_utils.ALL_CACHE_IMPLEMENTATIONS:
            _accept((*configuration_utils.ALL_CACHE_IMPLEMENTATIONS, name))
    if VALIDATE_TAKES_USER_ATTRIBUTES:
        _originals.validate(self, strict=strict, user_set_attributes=user_set_attributes)
    else:
        _originals.validate(self, strict=strict)


def _prepare_cache_for_generation(
    self: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
) -> bool | None:
    """Build the kvrack cache that `cache_implementation` names; anything else is left to transformers."""
    assert _originals is not None
    name = generation_config.cache_implementation
    argument = cache_argument(self)
    given = model_kwargs.get(argument)
    answer: bool | None = None
    drafts = generation_mode == GenerationMode.ASSISTED_GENERATION or getattr(generation_config, "is_assistant", False)
    if (
        name is None
        or given is not None
        or generation_config.use_cache is False
        or not _serves(name, generation_config.cache_config)
    ):
        answer = _originals.prepare(
            self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
    else:
        asked = getattr(generation_config, "max_cache_len", None) or 0
        # The last drafts may reach past the longest answer before they are rolled back.
        ahead = _drafted_tokens(generation_config) if drafts else 0
        model_kwargs[argument] = create_cache(
            self, name, max_length=max(max_cache_length + ahead, asked), **dict(generation_config.cache_config or {})
        )
        note_cache(model_kwargs[argument])
    cache = model_kwargs.get(argument)
    if drafts and isinstance(cache, AnyCache):
        # Drafts are rolled back; releases before about 5.15 don't ask for it themselves.
        cache.activate_past_recording()
    return answer


def _drafted_tokens(generation_config: GenerationConfig) -> int:
    """Return how many tokens generate may draft at once, the one that follows them included."""
    drafted = (
        getattr(generation_config, key, None) or 0 for key in ("prompt_lookup_num_tokens", "num_assistant_tokens")
    )
    return max(drafted) + 1
