"""Caches of which several ranks hold a part each: one path, one file a rank, and no other number of ranks."""

import pytest
import torch

import kvrack
from kvrack import LayerSpec, ModelSpec, Shard, SnapshotError
from kvrack.shards import part_path

pytestmark = pytest.mark.usefixtures("plain")

SPEC = LayerSpec(kv_heads=1, key_head_dim=4, value_head_dim=4)


def filled(shard: Shard | None, heads: int = 1) -> kvrack.Cache:
    cache = kvrack.create_cache("plain", ModelSpec(layers=(SPEC,) * 2, shard=shard))
    states = torch.arange(heads * 12.0).view(1, heads, 3, 4) + (0 if shard is None else 100 * shard.rank)
    for layer in range(2):
        cache.update(states, states, layer)
    return cache


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("rank", [-1, 0, 2])
def test_a_shard_is_one_of_several(rank, count):
    with pytest.raises(ValueError, match="from 0 of 2 or more"):
        Shard(rank, count)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("prefix.kv", "prefix.rank1of4.kv"),
        ("prefix", "prefix.rank1of4"),
        ("pre.fix.kv", "pre.fix.rank1of4.kv"),
        ("prefix.rank1of4.kv", "prefix.rank1of4.kv"),
        ("prefix.rank1of2.kv", "prefix.rank1of2.rank1of4.kv"),
    ],
)
def test_a_rank_is_in_the_name_of_its_file(tmp_path, given, expected):
    assert part_path(tmp_path / given, Shard(1, 4)) == tmp_path / expected
    assert part_path(tmp_path / given, None) == tmp_path / given


def test_ranks_save_to_one_path_and_load_their_own(tmp_path):
    path = tmp_path / "prefix.kv"
    shards = [Shard(rank, 2) for rank in range(2)]
    for shard in shards:
        filled(shard).save(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["prefix.rank0of2.kv", "prefix.rank1of2.kv"]
    for shard in shards:
        for named in (path, part_path(path, shard)):
            loaded = kvrack.load(named, shard=shard)
            assert loaded.model_spec.shard == shard
            assert torch.equal(loaded.layers[1].keys, filled(shard).layers[1].keys)
        assert kvrack.describe(path, shard).recipe.spec().shard == shard


def test_a_copy_and_its_files_belong_to_the_same_rank(tmp_path):
    cache = filled(Shard(1, 2)).fork()
    cache.save(tmp_path / "prefix.kv")
    assert cache.twin().model_spec.shard == kvrack.load(tmp_path / "prefix.kv", shard=Shard(1, 2)).model_spec.shard


@pytest.mark.parametrize(
    ("saved", "loaded", "text"),
    [
        ([Shard(0, 2)], None, r"prefix\.kv was saved by 2 ranks, a file each \(prefix\.rank0of2\.kv, .*not split"),
        ([Shard(0, 2), Shard(1, 2)], Shard(1, 4), r"prefix\.kv was saved by 2 ranks, .* loaded for rank 1 of 4"),
        ([None], Shard(1, 2), r"prefix\.kv was saved by a model that is not split .* loaded for rank 1 of 2"),
    ],
)
def test_another_number_of_ranks_is_refused(tmp_path, saved, loaded, text):
    for shard in saved:
        filled(shard).save(tmp_path / "prefix.kv")
    with pytest.raises(SnapshotError, match=text) as refused:
        kvrack.load(tmp_path / "prefix.kv", shard=loaded)
    assert refused.value.fault == "other shard"


@pytest.mark.parametrize("loaded", [None, Shard(1, 2), Shard(0, 4)])
def test_what_the_file_says_counts_and_not_its_name(tmp_path, loaded):
    filled(Shard(0, 2)).save(tmp_path / "prefix.kv")
    renamed = (tmp_path / "prefix.rank0of2.kv").rename(part_path(tmp_path / "mine.kv", loaded))
    with pytest.raises(SnapshotError, match="was saved by rank 0 of 2") as refused:
        kvrack.load(tmp_path / "mine.kv", shard=loaded)
    assert refused.value.fault == "other shard"
    assert str(renamed) in str(refused.value)


def test_a_rank_whose_file_is_missing_says_which(tmp_path):
    filled(Shard(0, 2)).save(tmp_path / "prefix.kv")
    with pytest.raises(FileNotFoundError, match=r"prefix\.rank1of2\.kv"):
        kvrack.load(tmp_path / "prefix.kv", shard=Shard(1, 2))


def test_files_left_by_another_number_of_ranks_do_no_harm(tmp_path):
    for shard in (Shard(0, 4), Shard(0, 2), None):
        filled(shard).save(tmp_path / "prefix.kv")
    for shard in (Shard(0, 4), Shard(0, 2), None):
        assert kvrack.load(tmp_path / "prefix.kv", shard=shard).model_spec.shard == shard


def test_ranks_share_a_stores_folder(tmp_path):
    shards = [Shard(rank, 2) for rank in range(2)]
    stores = [kvrack.PrefixStore(1 << 20, tmp_path) for _ in shards]
    for store, shard in zip(stores, shards, strict=True):
        assert store.put([3, 1, 4], filled(shard))
    again = kvrack.PrefixStore(1 << 20, tmp_path)
    assert len(again) == 2
    for shard in shards:
        found, length = again.get([3, 1, 4, 1], like=filled(shard).twin())
        assert length == 3
        assert torch.equal(found.layers[0].keys, filled(shard).layers[0].keys)


# --- devices --------------------------------------------------------------------------------------


def test_each_layer_is_loaded_to_its_own_device(tmp_path):
    filled(None).save(tmp_path / "prefix.kv")
    cache = kvrack.load(tmp_path / "prefix.kv", ["cpu", "meta"])
    assert [layer.keys.device.type for layer in cache.layers] == ["cpu", "meta"]
    with pytest.raises(ValueError, match="one for each of 2 layers, got 3"):
        kvrack.load(tmp_path / "prefix.kv", ["cpu"] * 3)
