"""transformers' own caches of the same kind as kvrack's, made as its documentation says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, QuantizedCache, StaticCache

from kvrack import KvrackError
from kvrack.config import resolve_alias
from kvrack_transformers.bench.allocations import plain
from kvrack_transformers.bench.entries import Asked, Entry

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CODECS = ("fp8", "hqq", "quanto")
SHARED_KEYS = ("nbits", "axis_key", "axis_value", "q_group_size", "residual_length")
"""Settings that mean the same to both, apart from the axes' defaults."""
ADVISED: Mapping[str, Mapping[str, int]] = {"hqq": {"axis_key": 1, "axis_value": 1}}
"""What its documentation sets beyond the defaults (KV cache strategies, quantized cache)."""


class NoCounterpart(KvrackError):
    """transformers has no cache like one of kvrack's, or not here."""


def reference() -> Entry:
    """Return transformers' plain cache, which keeps tokens by concatenation: the dense one to compare with."""
    return Entry(
        "dynamic",
        "transformers",
        "DynamicCache(config=model.config)",
        lambda model, _: DynamicCache(config=model.config),
    )


def counterpart(asked: Asked, device: torch.device) -> Entry:
    """Return transformers' cache of the same kind. Raises NoCounterpart, saying why there is none."""
    name, settings = resolve_alias(asked.name, asked.settings)
    if name == "offload":
        return _offloaded(asked, str(settings.get("inner", "dynamic")), settings, device)
    if name in ("offloaded", "offloaded_static"):
        return _offloaded(asked, "static" if name == "offloaded_static" else "dynamic", settings, device)
    if name == "dynamic":
        return reference()
    if name == "static":
        return _static(asked, settings, offloading=False)
    if name in CODECS:
        return _quantized(asked, name, settings)
    raise NoCounterpart(f"transformers has no cache of the kind {asked.name!r}")


def _static(asked: Asked, settings: Mapping[str, Any], offloading: bool) -> Entry:
    capacity: int | None = settings.get("max_cache_len")
    more = ", offloading=True" if offloading else ""

    def make(model: PreTrainedModel, tokens: int) -> Any:
        return StaticCache(
            config=model.config, max_cache_len=tokens if capacity is None else capacity, offloading=offloading
        )

    shown = "tokens to come" if capacity is None else capacity
    return Entry(asked.text, "transformers", f"StaticCache(config=model.config, max_cache_len={shown}{more})", make)


def _offloaded(asked: Asked, inner: str, settings: Mapping[str, Any], device: torch.device) -> Entry:
    if settings.get("tier", "host") != "host":
        raise NoCounterpart("transformers holds no cache on disk")
    if inner not in ("dynamic", "static"):
        raise NoCounterpart(f"transformers doesn't offload a cache of the kind {inner!r}")
    if device.type != "cuda":
        raise NoCounterpart(f"transformers' offloaded caches need a CUDA device, and the model is on {device.type}")
    if inner == "static":
        return _static(asked, settings, offloading=True)
    call = "DynamicCache(config=model.config, offloading=True)"
    return Entry(asked.text, "transformers", call, lambda model, _: DynamicCache(config=model.config, offloading=True))


def _quantized(asked: Asked, name: str, settings: Mapping[str, Any]) -> Entry:
    if settings.get("layout", "dynamic") != "dynamic":
        raise NoCounterpart("transformers' quantized caches only grow")
    bits = {settings[key] for key in ("nbits_key", "nbits_value") if settings.get(key) is not None}
    if bits:
        raise NoCounterpart("transformers' quantized caches have the same bits for keys and values")
    # Where no axis is given, kvrack groups keys by channel and values by token, which transformers can't.
    given = {**ADVISED.get(name, {}), **{key: settings[key] for key in SHARED_KEYS if settings.get(key) is not None}}
    call = f"QuantizedCache({name!r}, model.config{''.join(f', {key}={value}' for key, value in given.items())})"
    make: Callable[[PreTrainedModel, int], Any] = lambda model, _: QuantizedCache(name, model.config, **given)  # noqa: E731
    return Entry(asked.text, "transformers", call, make)


# --- what it holds -------------------------------------------------------------------------------


def stored_by_place(cache: Any) -> dict[str, int]:
    """Return the bytes of all tensors that the layers of one of transformers' caches keep, by device."""
    places: dict[str, int] = {}
    seen: set[int] = set()
    for layer in cache.layers:
        for tensor in _tensors(vars(layer)):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                places[str(tensor.device)] = places.get(str(tensor.device), 0) + storage.nbytes()
    return places


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from plain(value)
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
