"""Save and load a cache as one safetensors file. No code from the file is ever run.

Tensors are named ``<layer>.<storage name>``; the header's metadata has one JSON document under
"kvrack": format version, backend name and config, model spec, and each layer's integers.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvrack.cache import Cache, create_cache
from kvrack.errors import SnapshotError
from kvrack.model import ModelSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT_VERSION = 1


def save(cache: Cache, path: str | Path) -> None:
    """Write `cache` to `path`. The file appears whole or not at all; an older one is replaced."""
    tensors = {
        f"{index}.{name}": tensor.detach().contiguous()
        for index, layer in enumerate(cache.layers)
        for name, tensor in layer.storage().items()
    }
    document = {
        "format": FORMAT_VERSION,
        "backend": cache.backend.name,
        "config": cache.config.model_dump(mode="json"),
        "max_length": cache.max_length,
        "model": cache.model_spec.to_dict(),
        "layers": [layer.metadata() for layer in cache.layers],
    }
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"kvrack": json.dumps(document)})
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def load(path: str | Path, device: torch.device | str = "cpu") -> Cache:
    """Return the cache that `save` wrote, its tensors on `device`.

    Raises FileNotFoundError, SnapshotError for a file that is not a whole kvrack snapshot of a
    known format, and what `kvrack.resolve` raises for its backend.
    """
    source = Path(path)
    if not source.is_file():
        raise FileNotFoundError(f"no cache file at {source}")
    try:
        with safe_open(source, framework="pt", device=str(device)) as file:
            document = _document(source, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise SnapshotError(f"{source} is not a whole safetensors file (truncated or corrupted): {error}") from None
    try:
        spec = ModelSpec.from_dict(document["model"])
        name, config, states = document["backend"], document["config"], document["layers"]
        max_length = document["max_length"]
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{source} has a damaged description: {type(error).__name__}: {error}") from None
    cache = create_cache(name, spec, max_length, **config)
    try:
        _restore(cache, tensors, states)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise SnapshotError(f"{source} does not fit what it describes: {type(error).__name__}: {error}") from None
    return cache


def _document(source: Path, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    text = (metadata or {}).get("kvrack")
    if text is None:
        raise SnapshotError(f"{source} is a safetensors file, but not one that kvrack saved")
    try:
        document = json.loads(text)
        version = document["format"]
    except (ValueError, KeyError, TypeError):
        raise SnapshotError(f"{source} has a damaged description") from None
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise SnapshotError(
            f"{source} has format {version}, this kvrack reads up to {FORMAT_VERSION}. Run: pip install -U kvrack"
        )
    if not isinstance(document, dict):
        raise SnapshotError(f"{source} has a damaged description")
    return document


def _restore(cache: Cache, tensors: dict[str, torch.Tensor], states: list[dict[str, int]]) -> None:
    storages: list[dict[str, torch.Tensor]] = [{} for _ in states]
    for full_name, tensor in tensors.items():
        index, _, name = full_name.partition(".")
        storages[int(index)][name] = tensor
    cache.grow_to(len(states))
    for layer, storage, metadata in zip(cache.layers, storages, states, strict=True):
        layer.restore(storage, metadata)
