"""A model and a backend's name -> the cache to pass to the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvrack
from kvrack_transformers.cache import TransformersCache
from kvrack_transformers.dispatched import layer_devices
from kvrack_transformers.encoder_decoder import TransformersEncoderDecoderCache
from kvrack_transformers.reading import model_spec
from kvrack_transformers.sharding import shard_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AnyCache = TransformersCache | TransformersEncoderDecoderCache


def create_cache(
    model: PreTrainedModel | PreTrainedConfig, name: str, *, max_length: int | None = None, **config: Any
) -> AnyCache:
    """Return a new, empty cache for `model`, to pass as ``past_key_values=`` (or ``cache=``).

    Args:
        model: the model, or its config.
        name: a `cache_implementation` string.
        max_length: tokens that prompt and answer will have together (of the decoder), None when unknown.
        **config: the backend's keys, as in `cache_config`.

    Raises what `kvrack.create_cache` raises, and UnknownLayerType.
    """
    return wrap(kvrack.create_cache(name, model_spec(model), max_length, **config))


def load(model: PreTrainedModel, path: str | Path, fingerprint: str | None = None) -> AnyCache:
    """Return the cache that ``cache.save(path)`` wrote, for `model` to go on with.

    Each layer's memory is where the model makes its keys. Where tensor parallelism split the model over
    ranks, each calls this with the path that was saved to, and gets its own part.

    Args:
        model: the model.
        path: the file, as it was given to `save`.
        fingerprint: what the cache must belong to, as `fingerprint(model)` gives it; None to take any.

    Raises what `kvrack.load` raises, above all SnapshotError where another number of ranks saved it.
    """
    return wrap(kvrack.load(path, layer_devices(model), fingerprint, shard_of(model)))


def wrap(rack: kvrack.Cache) -> AnyCache:
    """Return a kvrack cache, one that was loaded or forked say, as transformers takes it."""
    return TransformersEncoderDecoderCache(rack) if rack.model_spec.is_encoder_decoder else TransformersCache(rack)
