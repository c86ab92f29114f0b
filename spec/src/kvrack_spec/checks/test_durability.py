"""Durability: deepcopy, fork, save and load."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import kvrack
from kvrack.layer import AttentionLayer
from kvrack_spec.compare import Unchanged, expect_same
from kvrack_spec.expect import expect, expect_equal
from kvrack_spec.subject import Shape, Subject, layer_spec

FILLS = [(3, 0), (9, 3), (55, 30), (140, 9)]


def _cache(subject: Subject, kind: str, fill: tuple[int, int], shape: Shape = Shape()) -> kvrack.Cache:  # noqa: B008
    cache = subject.cache(layer_spec(kind))
    subject.fill(_layer(cache), *fill, shape=shape)
    return cache


def _layer(cache: kvrack.Cache) -> AttentionLayer:
    layer = cache.layers[0]
    assert isinstance(layer, AttentionLayer)
    return layer


def _expect_continues(subject: Subject, copied: kvrack.Cache, cache: kvrack.Cache, shape: Shape = Shape()) -> None:  # noqa: B008
    expect_equal(copied.batch_size, cache.batch_size, "batch_size")
    for seed in (80, 81, 82):
        expect_same(_layer(copied), _layer(cache), *subject.states(1, shape, seed))


def _crops(layer: AttentionLayer, removed: int) -> bool:
    try:
        layer.check_crop(-removed)
    except kvrack.UnsupportedOperation:
        return False
    return True


COPIES: dict[str, Callable[[kvrack.Cache], kvrack.Cache]] = {
    "deepcopy": copy.deepcopy,
    "fork": lambda cache: cache.fork(),
}


@pytest.mark.rule("D1")
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_continues_the_same(subject: Subject, kind: str, way: str) -> None:
    for fill in FILLS:
        cache = _cache(subject, kind, fill)
        _expect_continues(subject, COPIES[way](cache), cache)


@pytest.mark.rule("D2")
def test_a_deepcopy_shares_no_memory(subject: Subject, kind: str) -> None:
    for fill in FILLS:
        cache = _cache(subject, kind, fill)
        twin = copy.deepcopy(cache)
        # Kept, since what is brought as a copy leaves its address to the next.
        storage = _layer(cache).storage()
        memories = {tensor.untyped_storage().data_ptr() for tensor in storage.values() if tensor.numel()}
        for name, tensor in _layer(twin).storage().items():
            shared = tensor.numel() > 0 and tensor.untyped_storage().data_ptr() in memories
            expect(not shared, f"storage()[{name!r}] of a copy in memory of its own", "memory shared with the original")


@pytest.mark.rule("D2")
def test_a_copy_and_its_original_leave_each_other_alone(subject: Subject, kind: str) -> None:
    for fill, way in itertools.product(FILLS, COPIES):
        cache = _cache(subject, kind, fill)
        for changed, other in ((COPIES[way](cache), cache), (cache, COPIES[way](cache))):
            with Unchanged(_layer(other), f"what was done to its {way}"):
                subject.fill(_layer(changed), 0, 5)
                for removed in (1, 7):
                    # Up to a token that both had.
                    if _crops(_layer(changed), removed):
                        changed.crop(-removed)
                        subject.fill(_layer(changed), 0, 2)
                _layer(changed).reset()
                subject.fill(_layer(changed), 3, 1)


@pytest.mark.rule("D7")
def test_branches_go_on_as_caches_of_their_own(subject: Subject, kind: str) -> None:
    for fill in FILLS:
        branches = [_cache(subject, kind, fill)]
        branches += [branches[0].fork(), branches[0].fork()]
        branches.append(branches[1].fork())
        alone = [_cache(subject, kind, fill) for _ in branches]
        for step in range(6):
            for index, (branch, other) in enumerate(zip(branches, alone, strict=True)):
                expect_same(_layer(branch), _layer(other), *subject.states(1, seed=100 * index + step))


@pytest.mark.rule("D7")
@pytest.mark.capability("crops")
def test_a_branch_at_an_earlier_point(subject: Subject) -> None:
    for prefill, steps in FILLS:
        cache = _cache(subject, "full", (prefill, steps))
        held = prefill + steps
        for removed in (0, 1, 2, held):
            if not _crops(_layer(cache), removed):
                with pytest.raises(kvrack.UnsupportedOperation):
                    cache.fork(tokens=held - removed)
                continue
            with Unchanged(_layer(cache), f"fork(tokens={held - removed})"):
                branch = cache.fork(tokens=held - removed)
                expect_equal(branch.get_seq_length(), held - removed, f"length of fork(tokens={held - removed})")
                subject.fill(_layer(branch), 0, 3)
            wanted = copy.deepcopy(cache)
            wanted.crop(-removed)
            subject.fill(_layer(wanted), 0, 3)
            _expect_continues(subject, branch, wanted)
        for wrong in (-1, held + 1):
            with pytest.raises(ValueError, match="tokens seen"):
                cache.fork(tokens=wrong)


@pytest.mark.rule("D3")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loaded_cache_continues_the_same(subject: Subject, kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    shape = Shape(dtype=dtype)
    for fill in FILLS:
        cache = _cache(subject, kind, fill, shape)
        cache.save(tmp_path / "cache.safetensors")
        loaded = kvrack.load(tmp_path / "cache.safetensors", subject.device)
        expect_equal(loaded.backend.name, cache.backend.name, "backend of a loaded cache")
        expect_equal(loaded.config, cache.config, "config of a loaded cache")
        _expect_continues(subject, loaded, cache, shape)


@pytest.mark.rule("D3")
@pytest.mark.capability("records_past")
def test_a_recorded_past_is_saved(subject: Subject, kind: str, tmp_path: Path) -> None:
    cache = subject.cache(layer_spec(kind))
    cache.activate_past_recording()
    subject.fill(_layer(cache), 9, 5)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvrack.load(tmp_path / "cache.safetensors", subject.device)
    for each in (cache, loaded):
        subject.fill(_layer(each), 0, 3)
    try:
        cache.crop(-7)
    except NotImplementedError:
        pytest.skip("the past was not recorded: L22 says more")
    loaded.crop(-7)
    _expect_continues(subject, loaded, cache)


@pytest.mark.rule("D4")
def test_a_saved_cache_is_one_plain_file(subject: Subject, kind: str, tmp_path: Path) -> None:
    cache = _cache(subject, kind, (9, 3))
    cache.save(tmp_path / "cache.safetensors")
    expect_equal([path.name for path in tmp_path.iterdir()], ["cache.safetensors"], "files written")
    with safe_open(tmp_path / "cache.safetensors", framework="pt") as file:
        names = sorted(file.keys())
        document = json.loads(file.metadata()["kvrack"])
    wanted = sorted(f"0.{name}" for name in _layer(cache).storage())
    expect_equal(names, wanted, "tensors in the file")
    expect_equal(document["backend"], cache.backend.name, "backend in the file")


@pytest.mark.rule("D4")
def test_each_rank_has_a_file_of_its_own(subject: Subject, tmp_path: Path) -> None:
    path, shards = tmp_path / "cache.safetensors", [kvrack.Shard(rank, 2) for rank in range(2)]
    parts = [subject.cache(shard=shard) for shard in shards]
    for seed, part in enumerate(parts):
        part.update(*subject.states(9, Shape(heads=1), seed=seed), 0)
        part.save(path)
    wanted = ["cache.rank0of2.safetensors", "cache.rank1of2.safetensors"]
    expect_equal(sorted(each.name for each in tmp_path.iterdir()), wanted, "files written by two ranks")
    for shard, part in zip(shards, parts, strict=True):
        loaded = kvrack.load(path, shard=shard)
        expect_same(_layer(loaded), _layer(part), *subject.states(1, Shape(heads=1), seed=77))
    for other in (None, kvrack.Shard(0, 4)):
        with pytest.raises(kvrack.SnapshotError, match="was saved by 2 ranks"):
            kvrack.load(path, shard=other)


@pytest.mark.rule("D8")
def test_a_damaged_file_is_never_another_cache(subject: Subject, tmp_path: Path) -> None:
    cache = _cache(subject, "full", (55, 30))
    path = tmp_path / "cache.safetensors"
    cache.save(path, fingerprint="this model")
    content, chance = path.read_bytes(), random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        position = chance.randrange(len(damaged))
        if chance.random() < 0.2:
            del damaged[position:]
        else:
            damaged[position] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            loaded = kvrack.load(path, subject.device)
        except kvrack.SnapshotError:
            continue
        _expect_continues(subject, loaded, copy.deepcopy(cache))
    path.write_bytes(content)
    with pytest.raises(kvrack.SnapshotError, match="another model"):
        kvrack.load(path, subject.device, fingerprint="another model")
    _expect_continues(subject, kvrack.load(path, subject.device, fingerprint="this model"), cache)


@pytest.mark.rule("D5")
def test_filled_with_grad(subject: Subject, kind: str, tmp_path: Path) -> None:
    cache = subject.cache(layer_spec(kind))
    with torch.enable_grad():
        for step, new in enumerate((9, 1)):
            keys, values = (states.requires_grad_() * 2 for states in subject.states(new, seed=step))
            cache.update(keys, values, 0)
    cache.save(tmp_path / "cache.safetensors")
    twin = copy.deepcopy(cache)
    for name, tensor in _layer(twin).storage().items():
        expect(not tensor.requires_grad, f"storage()[{name!r}] of a copy detached", "it requires grad")
    _expect_continues(subject, twin, cache)


@pytest.mark.rule("D6")
@pytest.mark.parametrize("way", ["new", "reset"])
def test_an_empty_cache_is_copied_and_saved(subject: Subject, kind: str, way: str, tmp_path: Path) -> None:
    cache = subject.cache(layer_spec(kind))
    if way == "reset":
        subject.fill(_layer(cache), 9, 3)
        cache.reset()
    cache.save(tmp_path / "cache.safetensors")
    for other in (copy.deepcopy(cache), kvrack.load(tmp_path / "cache.safetensors", subject.device)):
        expect_equal(other.get_seq_length(), 0, "get_seq_length()")
        expect_same(_layer(other), subject.layer(kind), *subject.states(4))
