"""Save and load: the whole state comes back bit for bit, and every bad file says what is wrong with it."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import kvrack
from kvrack import LayerSpec, ModelSpec
from kvrack.snapshot import FORMAT_VERSION

FULL = LayerSpec()
SLIDING = LayerSpec(attention="sliding", window=6)
MIXED = ModelSpec(layers=(FULL, SLIDING, LayerSpec(attention=None)), max_length=512, name="tiny")

pytestmark = pytest.mark.usefixtures("plain")


def states(new: int, seed: int, batch: int = 2, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, 2, new, 4, generator=generator).to(dtype),
        torch.randn(batch, 2, new, 3, generator=generator).to(dtype),
    )


def filled(recording: bool = False, dtype: torch.dtype = torch.float32) -> kvrack.Cache:
    cache = kvrack.create_cache("plain", MIXED, max_length=40, growth=1.5)
    if recording:
        cache.activate_past_recording()
    for index in range(2):
        for step, new in enumerate((9, 1, 4)):
            cache.update(*states(new, 10 * index + step, dtype=dtype), index)
    return cache


def assert_same(loaded: kvrack.Cache, saved: kvrack.Cache) -> None:
    assert len(loaded) == len(saved)
    for left, right in zip(loaded, saved, strict=True):
        assert left.metadata() == right.metadata()
        assert left.storage().keys() == right.storage().keys()
        for name, tensor in left.storage().items():
            assert tensor.dtype == right.storage()[name].dtype
            assert torch.equal(tensor, right.storage()[name])


def write(path: Path, document: object, tensors: dict[str, torch.Tensor] | None = None) -> None:
    """Write a safetensors file with this description, as another program might."""
    save_file(tensors or {}, path, metadata={"kvrack": document if isinstance(document, str) else json.dumps(document)})


def description(path: Path) -> dict:
    """Return the description in a file that kvrack saved."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(json.loads(file.read(length))["__metadata__"]["kvrack"])


# --- there and back -------------------------------------------------------------------------------


@pytest.mark.parametrize("recording", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path, recording, dtype):
    cache = filled(recording, dtype)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvrack.load(tmp_path / "cache.safetensors")
    assert_same(loaded, cache)
    assert loaded.config == cache.config
    assert loaded.model_spec == MIXED
    assert loaded.max_length == 40


@pytest.mark.parametrize("recording", [False, True])
def test_both_go_on_alike(tmp_path, recording):
    cache = filled(recording)
    cache.save(str(tmp_path / "cache.safetensors"))
    loaded = kvrack.load(str(tmp_path / "cache.safetensors"))
    for each in (cache, loaded):
        for index in range(2):
            each.update(*states(3, 99 + index), index)
        if recording:
            each.crop(-5)
    assert_same(loaded, cache)
    assert loaded.is_croppable == cache.is_croppable


def test_tokens_in_the_middle_of_a_buffer_are_saved_and_nothing_else(tmp_path):
    cache = kvrack.create_cache("plain", ModelSpec(layers=(LayerSpec(attention="sliding", window=3),)))
    for index in range(20):
        cache.update(*(each[:1, :1] for each in states(1, index)), 0)
    assert cache.layers[0]._keys.start > 0
    cache.save(tmp_path / "cache.safetensors")
    assert_same(kvrack.load(tmp_path / "cache.safetensors"), cache)
    assert (tmp_path / "cache.safetensors").stat().st_size < cache.nbytes + 2000


def test_an_empty_cache_and_one_merely_allocated_come_back(tmp_path):
    cache = kvrack.create_cache("plain", MIXED)
    cache.save(tmp_path / "empty.safetensors")
    assert kvrack.load(tmp_path / "empty.safetensors").nbytes == 0
    cache.early_initialization(2, 2, 4, torch.float32, torch.device("cpu"), value_head_dim=3)
    cache.save(tmp_path / "allocated.safetensors")
    loaded = kvrack.load(tmp_path / "allocated.safetensors")
    assert loaded.get_seq_length() == 0
    keys, _ = states(2, 0)
    assert torch.equal(loaded.update(*states(2, 0), 0)[0], keys)


def test_a_lazily_created_cache_comes_back_with_its_layers(tmp_path):
    cache = kvrack.create_cache("plain", ModelSpec(further=SLIDING))
    for index in (0, 1):
        cache.update(*states(9, index), index)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvrack.load(tmp_path / "cache.safetensors")
    assert_same(loaded, cache)
    loaded.update(*states(1, 5), 2)
    assert len(loaded) == 3


def test_a_loaded_cache_owns_its_memory(tmp_path):
    cache = filled()
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvrack.load(tmp_path / "cache.safetensors")
    (tmp_path / "cache.safetensors").unlink()
    loaded.layers[0].keys.zero_()
    assert cache.layers[0].keys.any()


# --- writing --------------------------------------------------------------------------------------


def test_an_older_file_is_replaced(tmp_path):
    path = tmp_path / "cache.safetensors"
    path.write_text("older")
    cache = filled()
    cache.save(path)
    assert_same(kvrack.load(path), cache)
    assert os.listdir(tmp_path) == ["cache.safetensors"]


def test_a_save_that_fails_leaves_the_older_file_and_nothing_half_written(tmp_path, monkeypatch):
    path = tmp_path / "cache.safetensors"
    cache = filled()
    cache.save(path)
    older = path.read_bytes()

    def fail(tensors, filename, metadata):
        Path(filename).write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr("kvrack.snapshot.save_file", fail)
    with pytest.raises(OSError, match="no space left"):
        cache.save(path)
    assert path.read_bytes() == older
    assert os.listdir(tmp_path) == ["cache.safetensors"]


def test_saving_into_a_folder_that_is_not_there_names_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder at .*absent"):
        filled().save(tmp_path / "absent" / "cache.safetensors")


# --- files that cannot be loaded ------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no cache file at .*nowhere\.safetensors"):
        kvrack.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(FileNotFoundError, match="no cache file at"):
        kvrack.load(tmp_path)


def test_a_safetensors_file_of_another_program_is_not_ours(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(3)}, path)
    with pytest.raises(kvrack.SnapshotError, match="is a safetensors file, but not one that kvrack saved"):
        kvrack.load(path)


def test_a_newer_format_says_what_is_read_and_what_to_run(tmp_path):
    path = tmp_path / "cache.safetensors"
    write(path, {"format": FORMAT_VERSION + 1, "anything": "else"})
    with pytest.raises(kvrack.SnapshotError) as caught:
        kvrack.load(path)
    assert str(caught.value) == (
        f"{path} has format {FORMAT_VERSION + 1}, this kvrack reads up to {FORMAT_VERSION}. Run: pip install -U kvrack"
    )


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -100])
def test_a_truncated_file_is_told_so(tmp_path, kept):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    with pytest.raises(kvrack.SnapshotError, match="is not a whole safetensors file"):
        kvrack.load(path)


def test_bytes_that_are_no_safetensors_file_are_told_so(tmp_path):
    path = tmp_path / "cache.safetensors"
    path.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(kvrack.SnapshotError, match="is not a whole safetensors file"):
        kvrack.load(path)


@pytest.mark.parametrize(
    "document",
    ["", "{", "3", "[1]", "null", "{}", '{"format": "one"}', '{"format": 1}', '{"format": true}'],
)
def test_a_damaged_description_is_told_so(tmp_path, document):
    path = tmp_path / "cache.safetensors"
    write(path, document)
    with pytest.raises(kvrack.SnapshotError, match=r"damaged description|has format"):
        kvrack.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": 3},
        {"model": {}},
        {"model": {"layers": [{"attention": "banana"}]}},
        {"backend": None},
        {"config": [1, 2]},
        {"config": None},
        {"max_length": "long"},
        {"layers": None},
        {"layers": {}},
        {"layers": [{}, {}, {}]},
        {"layers": [{"seen": "many", "record_past": 0}] * 3},
        {"layers": [{"seen": 14, "record_past": 0}]},
        {"layers": [{"seen": 14, "record_past": 0}] * 9},
    ],
    ids=str,
)
def test_a_description_that_does_not_fit_is_told_so(tmp_path, changes):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    tensors = {"0.keys": torch.zeros(2, 2, 14, 4), "0.values": torch.zeros(2, 2, 14, 3)}
    write(path, {**description(path), **changes}, tensors)
    with pytest.raises(kvrack.SnapshotError, match=r"damaged description|does not fit what it describes"):
        kvrack.load(path)


@pytest.mark.parametrize(
    "tensors",
    [
        {"0.keys": torch.zeros(2, 2, 14, 4)},
        {"0.keys": torch.zeros(2, 2), "0.values": torch.zeros(2, 2)},
        {"0.keys": torch.zeros(2, 2, 14, 4), "0.values": torch.zeros(2, 2, 13, 4)},
        {"9.keys": torch.zeros(2, 2, 14, 4)},
        {"-1.keys": torch.zeros(2, 2, 14, 4)},
        {"keys": torch.zeros(2, 2, 14, 4)},
        {"0.banana": torch.zeros(2, 2, 14, 4)},
    ],
    ids=lambda tensors: " ".join(tensors),
)
def test_tensors_that_do_not_fit_are_told_so(tmp_path, tensors):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    write(path, description(path), tensors)
    with pytest.raises(kvrack.SnapshotError, match="does not fit what it describes"):
        kvrack.load(path)


def test_a_backend_that_is_not_installed_is_named(tmp_path):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    write(path, {**description(path), "backend": "absent"})
    with pytest.raises(kvrack.UnknownBackend, match="unknown cache backend 'absent'"):
        kvrack.load(path)
