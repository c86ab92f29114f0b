"""Save and load a cache as one safetensors file. No code from the file is ever run.

Tensors are named ``<layer>.<storage name>`` and stored as the layer holds them, codes as codes. The
header's metadata has one JSON document under "kvrack" (`Description`): format version, how the
cache was built, each layer's integers, and a checksum of every tensor; and under "kvrack.checksum"
the document's own. So a byte that changed anywhere is noticed before a layer sees it.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvrack.cache import Cache
from kvrack.errors import KvrackError, SnapshotError, UnknownBackend
from kvrack.model import ModelSpec, Shard
from kvrack.recipe import Recipe
from kvrack.registry import distribution_of, installed
from kvrack.shards import check_shard, find_part, part_path

FORMAT_VERSION = 1
DOCUMENT, CHECKSUM = "kvrack", "kvrack.checksum"
Devices = torch.device | str | Sequence[torch.device | str]
"""One device for a whole cache, or one for each of its layers."""

MOST_HEADER = 100_000_000
"""Bytes of the longest header that safetensors allows."""


class Stored(BaseModel):
    """What is known of one tensor in the file.

    Attributes:
        dtype: its torch dtype, such as "float32".
        shape: its shape.
        crc32: checksum of its bytes.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    dtype: str
    shape: list[int]
    crc32: int


class Description(BaseModel):
    """The JSON document in the header: all of a cache that is no tensor.

    Attributes:
        format: version of this format.
        backend: name of the backend that builds the layers.
        recipe: how the cache was built.
        distribution: what provided the backend, and its version; empty when unknown.
        version: of that distribution.
        fingerprint: what the caller says the cache belongs to, such as a model and a tokenizer;
            None when it said nothing.
        token_ids: the tokens that the cache has seen, None when the caller gave none.
        notes: what else the caller wants kept with it, as text by name.
        layers: each layer's integers, as `CacheLayer.metadata` returned them.
        tensors: every tensor by its name in the file.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    format: int
    backend: str
    recipe: Recipe
    distribution: str
    version: str
    fingerprint: str | None
    token_ids: list[int] | None
    notes: dict[str, str]
    layers: list[dict[str, int]]
    tensors: dict[str, Stored]


def save(
    cache: Cache,
    path: str | Path,
    fingerprint: str | None = None,
    token_ids: Sequence[int] | None = None,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write `cache` to `path`. The file appears whole or not at all; an older one is replaced.

    Where the model is split over ranks, each calls this with the same path and writes its part to a
    file of its own: ``prefix.rank0of2.kv`` for ``prefix.kv``.

    Args:
        cache: what to write; of layers held elsewhere, a copy is brought here.
        path: the file, in a folder that exists.
        fingerprint: says what the cache belongs to; `load` compares it when it is given one.
        token_ids: the tokens that the cache has seen, kept beside it for `describe`.
        notes: what else to keep with it for `describe`, as text by name.

    Raises FileNotFoundError for a folder that isn't there, OSError where it can't be written.
    """
    target = part_path(path, cache.model_spec.shard)
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no folder at {target.parent} to save {target.name} in. Create it first")
    tensors = {
        f"{index}.{name}": tensor.detach().contiguous()
        for index, layer in enumerate(cache.layers)
        for name, tensor in layer.storage().items()
    }
    distribution, version = distribution_of(cache.backend.name)
    document = Description(
        format=FORMAT_VERSION,
        backend=cache.backend.name,
        recipe=cache.recipe(),
        distribution=distribution,
        version=version,
        fingerprint=fingerprint,
        token_ids=None if token_ids is None else [int(token) for token in token_ids],
        notes=dict(notes or {}),
        layers=[layer.metadata() for layer in cache.layers],
        tensors={name: _stored(tensor) for name, tensor in tensors.items()},
    ).model_dump_json()
    metadata = {DOCUMENT: document, CHECKSUM: str(zlib.crc32(document.encode()))}
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata=metadata)
        # On the disk before it takes the older one's name, or a power cut could leave an empty file under it.
        _flush(Path(temporary))
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _flush(target.parent)


def load(
    path: str | Path,
    device: Devices = "cpu",
    fingerprint: str | None = None,
    shard: Shard | None = None,
) -> Cache:
    """Return the cache that `save` wrote, its tensors on `device`.

    The file is mapped into memory, so that each byte is read once, into the layers' own memory; it
    may be deleted or replaced afterwards.

    Args:
        path: the file; of a cache that ranks saved, the path that was given to each of them.
        device: where the cache's memory shall be; one device, or one for each layer.
        fingerprint: what the cache must belong to; None to take any.
        shard: which part of the heads the model here has; None where it isn't split over ranks.

    Raises FileNotFoundError; SnapshotError, whose text and `fault` say what is wrong with the file,
    or that another number of ranks saved it; UnknownBackend, with what to install, and whatever else
    `kvrack.resolve` raises.
    """
    source = find_part(path, shard)
    description = describe(source)
    check_shard(source, _spec(source, description).shard, shard)
    return restored(source, description, device, fingerprint)


def restored(source: Path, description: Description, device: Devices = "cpu", fingerprint: str | None = None) -> Cache:
    """Return the cache in this very file, which `description` is of, whichever rank's it is; else as `load`."""
    if fingerprint is not None and description.fingerprint != fingerprint:
        was = "doesn't say for which" if description.fingerprint is None else f"is for {description.fingerprint!r}"
        raise SnapshotError(
            f"{source} belongs to another model: it {was}, expected {fingerprint!r}. Fill a cache with this model",
            fault="other model",
        )
    cache = _built(source, description)
    cache.grow_to(len(description.layers))
    devices = _for_each_layer(device, len(description.layers))
    try:
        with safe_open(source, framework="pt") as file:
            if set(file.keys()) != set(description.tensors):
                raise _corrupted(source, "its tensors are not those that it describes")
            _restore(source, cache, description, file, devices)
    except SafetensorError as error:
        raise _corrupted(source, str(error)) from None
    return cache


def describe(path: str | Path, shard: Shard | None = None) -> Description:
    """Return what a saved file says of itself, without its tensors.

    Args:
        path: the file, as of `load`.
        shard: whose file it is, as of `load`.

    Raises FileNotFoundError or SnapshotError.
    """
    source = find_part(path, shard)
    if not source.is_file():
        raise FileNotFoundError(f"no cache file at {source}")
    metadata = _header(source).get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(text := metadata.get(DOCUMENT), str):
        raise _foreign(source, "a safetensors file, but not one that kvrack saved")
    try:
        document = json.loads(text)
        version = document["format"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise _corrupted(source, "its description is damaged") from None
    # The version first: what a newer format holds besides, and how it is checked, is its own affair.
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise SnapshotError(
            f"{source} has format {version}, this kvrack reads up to {FORMAT_VERSION}. Run: pip install -U kvrack",
            fault="newer",
        )
    if metadata.get(CHECKSUM) != str(zlib.crc32(text.encode(errors="surrogatepass"))):
        raise _corrupted(source, "the checksum of its description is wrong")
    try:
        return Description.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _corrupted(source, f"its description is damaged: {where}: {first['msg']}") from None


def _header(source: Path) -> dict[str, Any]:
    """Return the header of a safetensors file, after a look at whether the file is as long as it must be."""
    size = source.stat().st_size
    with source.open("rb") as file:
        start = file.read(9)
        if len(start) < 9:
            raise SnapshotError(f"{source} is truncated: it has {size} bytes, less than a header", fault="truncated")
        (length,) = struct.unpack("<Q", start[:8])
        if length > MOST_HEADER or start[8:] != b"{":
            raise _foreign(source, "not a safetensors file, so none that kvrack saved")
        if 8 + length > size:
            raise _truncated(source, size, 8 + length)
        file.seek(8)
        text = file.read(length)
    try:
        header = json.loads(text)
        stops = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(stops, default=0)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise _corrupted(source, "its header is damaged") from None
    if size < expected:
        raise _truncated(source, size, expected)
    if size > expected:
        raise _corrupted(source, f"it has {size} bytes, {expected} expected")
    return header  # type: ignore[no-any-return]


def _spec(source: Path, description: Description) -> ModelSpec:
    try:
        return description.recipe.spec()
    except (LookupError, TypeError, ValueError) as error:
        raise _corrupted(source, f"its description is damaged: {type(error).__name__}: {error}") from None


def _built(source: Path, description: Description) -> Cache:
    """Return the empty cache that the file's recipe builds."""
    try:
        return description.recipe.build()
    except UnknownBackend as error:
        if error.name != description.backend or not description.distribution:
            raise
        raise UnknownBackend(error.name, list(installed()), description.distribution) from None
    except KvrackError:
        raise
    except (TypeError, ValueError) as error:
        raise _corrupted(source, f"its description is damaged: {type(error).__name__}: {error}") from None


def _restore(source: Path, cache: Cache, description: Description, file: Any, devices: list[torch.device]) -> None:
    storages: list[dict[str, torch.Tensor]] = [{} for _ in description.layers]
    names: list[dict[str, str]] = [{} for _ in description.layers]
    for full_name in description.tensors:
        index, _, name = full_name.partition(".")
        if not index.isdecimal() or int(index) >= len(names):
            raise _corrupted(source, f"it has a tensor {full_name!r} and {len(names)} layers")
        names[int(index)][full_name] = name
    if len(cache.layers) != len(names):
        raise _corrupted(source, f"it describes {len(names)} layers, its model has {len(cache.layers)}")
    for layer, named, storage, metadata, device in zip(
        cache.layers, names, storages, description.layers, devices, strict=True
    ):
        for full_name, name in named.items():
            tensor = file.get_tensor(full_name)
            if _stored(tensor) != description.tensors[full_name]:
                raise _corrupted(source, f"the checksum of its tensor {full_name!r} is wrong")
            storage[name] = tensor.to(device)
        try:
            layer.restore(storage, metadata)
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise _corrupted(source, f"it does not fit what it describes: {type(error).__name__}: {error}") from None
        # A tensor without elements, such as codes after their last block was cropped, may be made when it is needed.
        held, given = (
            sorted(name for name, each in held.items() if each.numel()) for held in (layer.storage(), storage)
        )
        if held != given:
            raise _corrupted(source, f"it does not fit what it describes: a layer has tensors {given}, not {held}")
        storage.clear()


def _for_each_layer(device: Devices, layers: int) -> list[torch.device]:
    if isinstance(device, torch.device | str):
        return [torch.device(device)] * layers
    if len(device) != layers:
        raise ValueError(f"device: expected one, or one for each of {layers} layers, got {len(device)}")
    return [torch.device(each) for each in device]


def _stored(tensor: torch.Tensor) -> Stored:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return Stored(
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        crc32=zlib.crc32(content.numpy().data) if content.numel() else 0,
    )


def _flush(path: Path) -> None:
    """Have the system write a file, or a folder's names, to the disk; folders can't be on every system."""
    with suppress(PermissionError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _foreign(source: Path, what: str) -> SnapshotError:
    return SnapshotError(f"{source} is {what}", fault="foreign")


def _truncated(source: Path, size: int, expected: int) -> SnapshotError:
    return SnapshotError(
        f"{source} is truncated: it has {size} of {expected} bytes. Save or copy it again", fault="truncated"
    )


def _corrupted(source: Path, reason: str) -> SnapshotError:
    return SnapshotError(f"{source} is corrupted: {reason}", fault="corrupted")
