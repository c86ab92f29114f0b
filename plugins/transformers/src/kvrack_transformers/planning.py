"""What ``kvrack plan`` finds out: the bytes of every cache for a model, what fits, and which one to take."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.filesize import decimal

import kvrack
from kvrack import Cache, KvrackError, ModelSpec, Prediction
from kvrack.companions import CROSS_ATTENTION, STATES

COMPANIONS = (CROSS_ATTENTION, STATES)
"""Backends that keep what others leave to them; asked for by name, they are `dynamic` with themselves beside it."""

OTHER_NAMES = {"offloaded": "offload over dynamic", "offloaded_static": "offload over static"}
"""Backends that are another by the name it has in transformers; not planned twice, as each takes filling caches."""

UNBOUNDED = 1 << 24
"""Tokens beyond which no longest context is looked for."""

BUILT = 1 << 17
"""Tokens up to which caches are built to find the longest context; past it, their bytes go on in a straight line."""

STEP = 1024
"""Tokens between two predictions that a straight line goes through, where each takes filling a cache."""


@dataclass(frozen=True)
class Need:
    """What a cache is wanted for.

    Attributes:
        spec: what the model needs remembered.
        context: tokens, prompt and answer together.
        batch: rows.
        dtype: of keys and values.
        encoder_tokens: length of an encoder's output, None where there is no encoder.
        settings: given to each backend that knows the key.
    """

    spec: ModelSpec
    context: int
    batch: int
    dtype: torch.dtype
    encoder_tokens: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What one backend would hold.

    Attributes:
        cache: its name.
        settings: its config keys that aren't the defaults.
        nbytes: all bytes of keys and values, codes, states and scratch, wherever they are.
        resident: those in the model's own memory.
        elsewhere: the others, by place, such as "disk" or "host".
        states: those of `nbytes` that don't grow with the context.
        fits: whether resident bytes fit; None where no memory was given.
        longest: the longest context that fits, at most what the model was made for; None likewise.
        lossless: whether answers stay those of a plain cache.
        constructed: whether the whole cache was built; else it was carried on from small ones.
        unknown_layers: layers, by index, of which something isn't counted.
    """

    cache: str
    settings: dict[str, Any]
    nbytes: int
    resident: int
    elsewhere: dict[str, int]
    states: int
    fits: bool | None
    longest: int | None
    lossless: bool
    constructed: bool
    unknown_layers: tuple[int, ...]


@dataclass(frozen=True)
class Plans:
    """What all installed backends would hold.

    Attributes:
        plans: of each that can be planned, fewest resident bytes first.
        refused: why each of the others can't, by name.
        warned: what building them warned of, by name.
    """

    plans: list[Plan]
    refused: dict[str, str]
    warned: dict[str, str]


def plan_all(need: Need, room: int | None) -> Plans:
    """Return the plans of every installed backend but the companions and those of `OTHER_NAMES`.

    Args:
        need: what a cache is wanted for.
        room: bytes there are for it, None when that isn't asked.

    Raises KvrackError for a setting that no backend knows, and where no backend can be planned.
    """
    plans: list[Plan] = []
    refused: dict[str, str] = {}
    warned: dict[str, str] = {}
    given = _settings_by_backend(need.settings)
    for name, settings in given.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                plans.append(_plan(name, settings, need, room))
            except (KvrackError, OSError, RuntimeError, ValueError) as error:
                refused[name] = " ".join(str(error).split())
        said = [str(each.message) for each in caught if str(each.message).startswith(name)]
        if said and name not in refused:
            warned[name] = " ".join(said[0].removeprefix(f"{name}:").split())
    if not plans:
        raise KvrackError(f"no installed backend can be planned: {'; '.join(refused.values()) or 'there is none'}")
    return Plans(sorted(plans, key=lambda each: (each.resident, each.cache)), refused, warned)


def _settings_by_backend(settings: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, of the backends to plan, what each knows of `settings`; one that is broken will say so later."""
    found: dict[str, dict[str, Any]] = {}
    known: set[str] = set()
    for name, info in sorted(kvrack.backends().items()):
        if name in COMPANIONS or name in OTHER_NAMES:
            continue
        keys = set() if info.error else set(type(kvrack.resolve(name).config).model_fields)
        known |= keys
        found[name] = {key: value for key, value in settings.items() if key in keys}
        if "tier" in keys and "tier" not in settings and not torch.accelerator.is_available():
            # Host memory is where the cache is anyway; on a disk there is something to see.
            found[name]["tier"] = "disk"
    strange = sorted(set(settings) - known)
    if strange:
        raise KvrackError(f"--set: no installed backend has a key {strange[0]!r}. Keys: {', '.join(sorted(known))}")
    return found


def _plan(name: str, settings: dict[str, Any], need: Need, room: int | None) -> Plan:
    def predict(tokens: int) -> Prediction:
        return kvrack.predict_memory(
            name, need.spec, tokens, need.batch, need.dtype, encoder_tokens=need.encoder_tokens, **settings
        )

    predicted = predict(need.context)
    elsewhere: Counter[str] = Counter()
    for row in predicted.rows:
        if row.device != "meta":
            elsewhere[row.device] += row.nbytes
    fits = longest = None
    if room is not None:
        fits = predicted.resident <= room
        longest = _longest(predict, need, predicted, room)
    return Plan(
        cache=name,
        settings=settings,
        nbytes=predicted.nbytes,
        resident=predicted.resident,
        elsewhere=dict(elsewhere),
        states=sum(row.nbytes for row in predicted.rows if row.role.startswith("states")),
        fits=fits,
        longest=longest,
        lossless=_is_lossless(kvrack.create_cache(name, need.spec, need.context, **settings)),
        constructed=predicted.is_constructed,
        unknown_layers=predicted.unknown,
    )


def _is_lossless(cache: Cache) -> bool:
    return all(layer.capabilities.lossless for layer in cache.layers if not layer.spec.holds_nothing)


def _longest(predict: Callable[[int], Prediction], need: Need, found: Prediction, room: int) -> int:
    """Return the largest number of tokens, up to what the model was made for, that take at most `room` bytes.

    A cache that preallocates less than that, as its settings say, has its capacity for the largest.
    """
    most = need.spec.max_length or UNBOUNDED
    if room < 0:
        return 0
    if not found.is_constructed:
        each = (predict(need.context + STEP).resident - found.resident) / STEP
        if each <= 0:
            return most if found.resident <= room else 0
        return max(0, min(most, need.context + int((room - found.resident) // each)))

    def resident(tokens: int) -> float:
        try:
            return predict(tokens).resident
        except kvrack.CapacityExceeded:
            return math.inf

    low, high = 0, min(most, BUILT)
    held = resident(high)
    if held <= room:
        if high == most:
            return high
        each = (held - resident(high // 2)) / (high - high // 2)
        return most if each <= 0 else min(most, high + int((room - held) // each))
    # What is wanted to three digits; a token more or less is decided by what else uses the memory.
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if resident(middle) <= room else (low, middle)
    return low


def recommend(plans: list[Plan], memory: int | None, weights: int | None) -> tuple[str | None, str]:
    """Return the backend to take and why: exact before approximate, wholly resident before offloaded.

    Args:
        plans: of all backends.
        memory: bytes for weights and cache together, None when that isn't asked.
        weights: bytes of the weights, None when unknown.
    """
    fitting = [each for each in plans if each.fits is not False]
    if not fitting:
        if memory is not None and weights is not None and weights >= memory:
            return None, f"the weights alone take {decimal(weights)} of {decimal(memory)}"
        least = min(plans, key=lambda each: each.resident)
        shorter = f"its longest context that fits is {least.longest:,} tokens" if least.longest else "no context fits"
        return None, f"even {least.cache} needs {decimal(least.resident)} beside the weights; {shorter}"

    def order(each: Plan) -> tuple[bool, bool, bool, int]:
        return not each.lossless, each.resident < each.nbytes, each.cache != "dynamic", each.resident

    best = min(fitting, key=order)
    kind = "its answers are exact" if best.lossless else "no exact cache fits"
    where = "all of it stays resident" if best.resident == best.nbytes else "part of it is held elsewhere"
    if memory is None:
        return best.cache, f"{kind}, and {where}"
    beside = "with the weights" if weights is not None else "beside weights of unknown size"
    return best.cache, f"{kind}, {where}, and it fits {decimal(memory)} {beside}"
