"""generate with fallbacks: another cache where the first runs out of memory."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

import kvrack
from kvrack_transformers.enabling import noting_caches
from kvrack_transformers.versions import given_caches

logger = logging.getLogger("kvrack.transformers")

Choice = str | tuple[str, Mapping[str, Any]]
"""A `cache_implementation`, alone or with its `cache_config`."""

DEFAULT = "generate's own cache"


def _choice(choice: Choice) -> tuple[str | None, Mapping[str, Any] | None]:
    if isinstance(choice, str):
        return choice, None
    name, config = choice
    return name, config


def first_that_fits(
    attempt: Callable[[dict[str, Any]], Any],
    first: tuple[str | None, Mapping[str, Any] | None],
    fallback: Sequence[Choice],
    settings: Mapping[str, Any],
) -> Any:
    """Return what the first of several choices returns that has the memory for it.

    After an out-of-memory error what the attempt held is freed, a warning says what was tried and
    how much its cache held, and the next choice starts from the prompt again.

    Args:
        attempt: generates with the settings of one choice, `cache_implementation` and `cache_config`
            or none.
        first: name and config of the first choice.
        fallback: further choices in order.
        settings: what is generated with besides.

    Raises what `attempt` raises. Errors that aren't about memory pass through. When every choice runs
    out of memory the last one's error is raised, those before it are its causes, and its notes list
    what was tried. Names and configs are checked before anything is generated. ValueError for a
    cache given besides a fallback, which could not be built anew.
    """
    choices = [first, *map(_choice, fallback)]
    given = given_caches(settings)
    if given and fallback:
        raise ValueError(f"{given[0]}: a fallback builds its cache anew; leave {given[0]} out and name its backend")
    for name, config in choices[1:]:
        assert name is not None
        if name in kvrack.backends():
            kvrack.resolve(name, config)
    tried: list[str] = []
    last: Exception | None = None
    for index, (name, config) in enumerate(choices):
        own: dict[str, Any] = {} if name is None else {"cache_implementation": name, "cache_config": dict(config or {})}
        with noting_caches() as built:
            try:
                return attempt(own)
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
