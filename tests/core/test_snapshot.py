"""Save and load: the whole state comes back bit for bit, and every bad file says what is wrong with it."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
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
    """Write a safetensors file with this description and a right checksum of it, as another program might."""
    text = document if isinstance(document, str) else json.dumps(document)
    save_file(tensors or {}, path, metadata={"kvrack": text, "kvrack.checksum": str(zlib.crc32(text.encode()))})


def description(path: Path) -> dict:
    """Return the description in a file that kvrack saved."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return json.loads(json.loads(file.read(length))["__metadata__"]["kvrack"])


def described(tensors: dict[str, torch.Tensor]) -> dict:
    """Return what the description says of these tensors."""
    return {
        name: {"dtype": "float32", "shape": list(tensor.shape), "crc32": zlib.crc32(tensor.numpy().tobytes())}
        for name, tensor in tensors.items()
    }


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork to be killed in")
def test_a_save_killed_at_any_byte_leaves_the_older_file(tmp_path, monkeypatch):
    path, newer = tmp_path / "cache.safetensors", filled(dtype=torch.float16)
    older = filled()
    older.save(path)
    newer.save(tmp_path / "newer.safetensors")
    content = (tmp_path / "newer.safetensors").read_bytes()
    for written in [*range(0, len(content), 97), len(content)]:

        def killed(tensors, filename, metadata, written=written):
            Path(filename).write_bytes(content[:written])
            os._exit(9)

        child = os.fork()
        if child == 0:
            monkeypatch.setattr("kvrack.snapshot.save_file", killed)
            newer.save(path)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9
        assert_same(kvrack.load(path), older)
    newer.save(path)
    assert_same(kvrack.load(path), newer)


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
    with pytest.raises(kvrack.SnapshotError, match="is truncated: it has") as caught:
        kvrack.load(path)
    assert caught.value.fault == "truncated"


def test_bytes_that_are_no_safetensors_file_are_told_so(tmp_path):
    path = tmp_path / "cache.safetensors"
    path.write_bytes(bytes(range(256)) * 8)
    with pytest.raises(kvrack.SnapshotError, match="is not a safetensors file, so none that kvrack saved") as caught:
        kvrack.load(path)
    assert caught.value.fault == "foreign"


def test_bytes_behind_the_end_are_told_so(tmp_path):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(kvrack.SnapshotError, match=r"is corrupted: it has .* bytes, .* expected"):
        kvrack.load(path)


def test_a_thousand_corruptions_are_noticed(tmp_path):
    cache = filled()
    whole, path = tmp_path / "whole.safetensors", tmp_path / "cache.safetensors"
    cache.save(whole)
    content, chance = whole.read_bytes(), random.Random(0)
    (header,) = struct.unpack("<Q", content[:8])
    for number in range(1000):
        damaged = bytearray(content)
        # Half of them in the header, which is what decides what the rest means.
        position = chance.randrange(8 + header if number % 2 else len(damaged))
        kind = chance.choice(["bit", "byte", "zeros", "swap", "cut", "insert"])
        if kind == "bit":
            damaged[position] ^= 1 << chance.randrange(8)
        elif kind == "byte":
            damaged[position] = chance.randrange(256)
        elif kind == "zeros":
            damaged[position : position + 16] = bytes(len(damaged[position : position + 16]))
        elif kind == "swap":
            other = chance.randrange(len(damaged))
            damaged[position], damaged[other] = damaged[other], damaged[position]
        elif kind == "cut":
            del damaged[position : position + chance.randrange(1, 9)]
        else:
            damaged[position:position] = chance.randbytes(chance.randrange(1, 9))
        path.write_bytes(damaged)
        try:
            loaded = kvrack.load(path)
        except kvrack.SnapshotError:
            continue
        # Nothing that means anything was changed.
        assert_same(loaded, cache)
        assert (loaded.config, loaded.model_spec, loaded.max_length) == (cache.config, MIXED, 40)


@pytest.mark.parametrize(
    "document",
    ["", "{", "3", "[1]", "null", "{}", '{"format": "one"}', '{"format": 1}', '{"format": true}'],
)
def test_a_damaged_description_is_told_so(tmp_path, document):
    path = tmp_path / "cache.safetensors"
    write(path, document)
    with pytest.raises(kvrack.SnapshotError, match=r"its description is damaged"):
        kvrack.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"recipe": {"model": 3}},
        {"recipe": {"model": {}}},
        {"recipe": {"model": {"layers": [{"attention": "banana"}]}}},
        {"recipe": {"model": {"layers": [{"banana": 1}]}}},
        {"recipe": {"config": [1, 2]}},
        {"recipe": {"config": None}},
        {"recipe": {"max_length": "long"}},
        {"backend": None},
        {"token_ids": ["one"]},
        {"tensors": {}},
        {"tensors": {"0.keys": 3}},
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
    document = {**description(path), "tensors": described(tensors)}
    recipe = {**document["recipe"], **changes.get("recipe", {})}
    write(path, {**document, **changes, "recipe": recipe}, tensors)
    with pytest.raises(kvrack.SnapshotError, match=r"is corrupted: ") as caught:
        kvrack.load(path)
    assert caught.value.fault == "corrupted"


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
    write(path, {**description(path), "tensors": described(tensors)}, tensors)
    with pytest.raises(kvrack.SnapshotError, match=r"does not fit what it describes|it has a tensor"):
        kvrack.load(path)


def test_tensors_other_than_described_are_told_so(tmp_path):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    document = description(path)
    write(path, document, {"0.keys": torch.zeros(2, 2, 14, 4)})
    with pytest.raises(kvrack.SnapshotError, match="its tensors are not those that it describes"):
        kvrack.load(path)
    tensors = {name: torch.zeros(each["shape"]) for name, each in document["tensors"].items()}
    write(path, document, tensors)
    with pytest.raises(kvrack.SnapshotError, match=r"the checksum of its tensor '0.keys' is wrong"):
        kvrack.load(path)


def test_a_backend_that_is_not_installed_is_named_with_what_to_install(tmp_path):
    path = tmp_path / "cache.safetensors"
    filled().save(path)
    document = description(path)
    assert (document["distribution"], document["version"]) == ("plain-rack", "1.0")
    document["recipe"]["backend"] = document["backend"] = "absent"
    write(path, {**document, "distribution": "kvrack-absent"})
    with pytest.raises(kvrack.UnknownBackend, match=r"unknown cache backend 'absent'.*pip install kvrack-absent"):
        kvrack.load(path)
    write(path, {**document, "distribution": ""})
    with pytest.raises(kvrack.UnknownBackend, match="unknown cache backend 'absent'"):
        kvrack.load(path)


# --- what it belongs to ---------------------------------------------------------------------------


def test_a_fingerprint_is_compared_when_it_is_given(tmp_path):
    path = tmp_path / "cache.safetensors"
    cache = filled()
    cache.save(path, fingerprint="this model", token_ids=[3, 1, 4])
    assert_same(kvrack.load(path, fingerprint="this model"), cache)
    assert_same(kvrack.load(path), cache)
    with pytest.raises(
        kvrack.SnapshotError, match=r"belongs to another model.*'this model', expected 'that'"
    ) as caught:
        kvrack.load(path, fingerprint="that")
    assert caught.value.fault == "other model"
    cache.save(path)
    with pytest.raises(kvrack.SnapshotError, match="doesn't say for which, expected 'that'"):
        kvrack.load(path, fingerprint="that")


def test_a_file_is_described_without_its_tensors(tmp_path):
    path = tmp_path / "cache.safetensors"
    filled().save(path, fingerprint="this model", token_ids=torch.arange(14), notes={"of": "a test"})
    found = kvrack.describe(path)
    assert (found.format, found.backend, found.fingerprint) == (FORMAT_VERSION, "plain", "this model")
    assert found.token_ids == list(range(14))
    assert found.notes == {"of": "a test"}
    assert found.tensors["0.keys"].shape == [2, 2, 14, 4]
    assert found.recipe.build().model_spec == MIXED
