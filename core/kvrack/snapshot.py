"""Save and load a cache as one safetensors file. No code from the file is ever run.

Tensors are named ``<layer>.<storage name>``; the header's metadata has one JSON document under
"kvrack": format version, backend name and config, model spec, and each layer's integers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvrack.cache import Cache, create_cache
from kvrack.errors import SnapshotError
from kvrack.model import ModelSpec

FORMAT_VERSION = 1


class Description(BaseModel):
    """The JSON document in the header: all of a cache that is no tensor.

    Attributes:
        format: version of this format.
        backend: name of the backend that builds the layers.
        config: the backend's config.
        max_length: tokens the whole use will need, None when unknown.
        model: what `ModelSpec.to_dict` wrote.
        layers: each layer's integers, as `CacheLayer.metadata` returned them.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format: int
    backend: str
    config: dict[str, Any]
    max_length: int | None
    model: dict[str, Any]
    layers: list[dict[str, int]]


def save(cache: Cache, path: str | Path) -> None:
    """Write `cache` to `path`. The file appears whole or not at all; an older one is replaced."""
    tensors = {
        f"{index}.{name}": tensor.detach().contiguous()
        for index, layer in enumerate(cache.layers)
        for name, tensor in layer.storage().items()
    }
    description = Description(
        format=FORMAT_VERSION,
        backend=cache.backend.name,
        config=cache.config.model_dump(mode="json"),
        max_length=cache.max_length,
        model=cache.model_spec.to_dict(),
        layers=[layer.metadata() for layer in cache.layers],
    )
    target = Path(path)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder at {target.parent} to save {target.name} in. Create it first")
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata={"kvrack": description.model_dump_json()})
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
            description = _description(source, file.metadata())
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise SnapshotError(f"{source} is not a whole safetensors file (truncated or corrupted): {error}") from None
    try:
        spec = ModelSpec.from_dict(description.model)
    except (TypeError, ValueError) as error:
        raise SnapshotError(f"{source} has a damaged description: {type(error).__name__}: {error}") from None
    cache = create_cache(description.backend, spec, description.max_length, **description.config)
    try:
        _restore(cache, tensors, description.layers)
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise SnapshotError(f"{source} does not fit what it describes: {type(error).__name__}: {error}") from None
    return cache


def _description(source: Path, metadata: Mapping[str, str] | None) -> Description:
    text = (metadata or {}).get("kvrack")
    if text is None:
        raise SnapshotError(f"{source} is a safetensors file, but not one that kvrack saved")
    try:
        document = json.loads(text)
        version = document["format"]
    except (ValueError, LookupError, TypeError):
        raise SnapshotError(f"{source} has a damaged description") from None
    # The version first: what a newer format holds besides is its own affair.
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise SnapshotError(
            f"{source} has format {version}, this kvrack reads up to {FORMAT_VERSION}. Run: pip install -U kvrack"
        )
    try:
        return Description.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise SnapshotError(f"{source} has a damaged description: {where}: {first['msg']}") from None


def _restore(cache: Cache, tensors: dict[str, torch.Tensor], states: list[dict[str, int]]) -> None:
    storages: dict[str, dict[str, torch.Tensor]] = {str(index): {} for index in range(len(states))}
    for full_name, tensor in tensors.items():
        index, _, name = full_name.partition(".")
        storages[index][name] = tensor
    cache.grow_to(len(states))
    for layer, storage, metadata in zip(cache.layers, storages.values(), states, strict=True):
        layer.restore(storage, metadata)
        # A tensor without elements, such as codes after their last block was cropped, may be made when it is needed.
        held, given = (
            sorted(name for name, each in named.items() if each.numel()) for named in (layer.storage(), storage)
        )
        if held != given:
            raise ValueError(f"expected tensors {held} in a layer, got {given}")
