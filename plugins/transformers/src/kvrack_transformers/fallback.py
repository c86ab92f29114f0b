"""kt.generate: what is known of a prompt is not computed again, and another cache serves where memory runs out."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from transformers import PreTrainedModel

import kvrack
from kvrack_transformers.enabling import disable, enable, is_enabled, noting_caches
from kvrack_transformers.prefix import generate_once
from kvrack_transformers.versions import CACHE_ARGUMENT

logger = logging.getLogger("kvrack.transformers")

Choice = str | tuple[str, Mapping[str, Any]]
"""A `cache_implementation`, alone or with its `cache_config`."""

DEFAULT = "generate's own cache"


def generate(
    model: PreTrainedModel,
    inputs: torch.Tensor | None = None,
    *,
    cache_implementation: str | None = None,
    cache_config: Mapping[str, Any] | None = None,
    fallback: Sequence[Choice] = (),
    prefix_store: kvrack.PrefixStore | None = None,
    **settings: Any,
) -> Any:
    """Return what ``model.generate`` returns, from the first of several caches that has the memory for it.

    After an out-of-memory error what the attempt held is freed, a warning says what was tried and
    how much its cache held, and the next choice starts from the prompt again: a streamer meets its
    tokens once more, and sampling goes on from the random state there is.

    A kvrack cache of one row that is given for several sequences (beams, `num_return_sequences`, a
    batch that begins so) is forked and repeated; the one given stays as it is.

    Args:
        model: the model.
        inputs: as of ``model.generate``.
        cache_implementation: the first choice; None for what generate does by itself.
        cache_config: its config.
        fallback: further choices in order, each a name or ``(name, config)``.
        prefix_store: where the prompt's known beginning comes from, of the same backend and config, and
            where what was computed is put.
        **settings: everything else that ``model.generate`` takes, passed on as it is; it refuses
            what it doesn't know.

    Raises what ``model.generate`` raises. Errors that aren't about memory pass through from whichever
    attempt meets them. When every choice runs out of memory the last one's error is raised, those
    before it are its causes, and its notes list what was tried. Names and configs are checked before
    anything is generated. ValueError for a cache given besides a fallback, which could not be
    built anew.
    """
    choices = [(cache_implementation, cache_config), *map(_choice, fallback)]
    given = [name for name in ("past_key_values", "cache", CACHE_ARGUMENT) if settings.get(name) is not None]
    if given and fallback:
        raise ValueError(f"{given[0]}: a fallback builds its cache anew; leave {given[0]} out and name its backend")
    for name, config in choices[1:]:
        assert name is not None
        if name in kvrack.backends():
            kvrack.resolve(name, config)
    was_enabled = is_enabled()
    enable()
    try:
        return _first_that_fits(model, inputs, choices, settings, prefix_store)
    finally:
        if not was_enabled:
            disable()


def _choice(choice: Choice) -> tuple[str | None, Mapping[str, Any] | None]:
    if isinstance(choice, str):
        return choice, None
    name, config = choice
    return name, config


def _first_that_fits(
    model: PreTrainedModel,
    inputs: torch.Tensor | None,
    choices: Sequence[tuple[str | None, Mapping[str, Any] | None]],
    settings: Mapping[str, Any],
    prefix_store: kvrack.PrefixStore | None,
) -> Any:
    tried: list[str] = []
    last: Exception | None = None
    for index, (name, config) in enumerate(choices):
        own = {} if name is None else {"cache_implementation": name, "cache_config": dict(config or {})}
        with noting_caches() as built:
            try:
                return generate_once(model, inputs, {**own, **settings}, prefix_store)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                held = sum(cache.nbytes for cache in built)
                failed = error
            finally:
                built.clear()
        tried.append(f"{name or DEFAULT} ran out of memory, its cache holding {held:,} bytes: {_first_line(failed)}")
        _chain(failed, last)
        last = failed
        _free(failed)
        if index + 1 < len(choices):
            logger.warning("generate: %s. Trying %s", tried[-1], choices[index + 1][0])
    assert last is not None
    if len(tried) > 1:
        _note(last, "generate tried, in this order:\n" + "\n".join(f"- {line}" for line in tried))
    raise last


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that memory, of a device, the host or a place that holds a cache, ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, Exception) and bool(should_reduce_batch_size(error))


def _free(error: BaseException) -> None:
    """Let go of what the frames of a failed attempt hold, and give the device's cached memory back."""
    pending: BaseException | None = error
    while pending is not None:
        traceback.clear_frames(pending.__traceback__)
        pending = pending.__cause__ or pending.__context__
    clear_device_cache(garbage_collection=True)


def _chain(error: BaseException, earlier: BaseException | None) -> None:
    """Make `earlier` the first cause of `error`."""
    if earlier is None:
        return
    first = error
    while (cause := first.__cause__ or first.__context__) is not None and cause is not earlier:
        first = cause
    if first is not earlier:
        first.__cause__ = earlier


def _note(error: BaseException, text: str) -> None:
    # BaseException.add_note came with Python 3.11; what it sets is shown by later tools either way.
    error.__notes__ = [*getattr(error, "__notes__", []), text]


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
