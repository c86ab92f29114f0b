"""Cache: the layers in order, what acts on all of them, and what they hold."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch

import kvrack
from kvrack import LayerSpec, ModelSpec
from kvrack.layer import allocations

CPU = torch.device("cpu")
FULL = LayerSpec()
SLIDING = LayerSpec(attention="sliding", window=6)
CHUNKED = LayerSpec(attention="chunked", window=4)
NOTHING = LayerSpec(attention=None)
MIXED = ModelSpec(layers=(FULL, SLIDING, NOTHING, CHUNKED))

pytestmark = pytest.mark.usefixtures("plain")


def states(new: int, seed: int = 0, batch: int = 2, heads: int = 2, dim: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, new, dim, generator=generator) for _ in range(2))


def feed(cache: kvrack.Cache, new: int, seed: int = 0, batch: int = 2) -> None:
    """Give every layer that attends `new` tokens, other ones in each."""
    for index, spec in enumerate(cache.model_spec.layers):
        if not spec.holds_nothing:
            cache.update(*states(new, seed=100 * seed + index, batch=batch), index)


def held(cache: kvrack.Cache) -> list[tuple[dict[str, torch.Tensor], dict[str, int]]]:
    return [({name: tensor.clone() for name, tensor in layer.storage().items()}, layer.metadata()) for layer in cache]


def assert_same(left, right) -> None:
    assert len(left) == len(right)
    for (left_storage, left_metadata), (right_storage, right_metadata) in zip(left, right, strict=True):
        assert left_metadata == right_metadata
        assert left_storage.keys() == right_storage.keys()
        for name, tensor in left_storage.items():
            assert torch.equal(tensor, right_storage[name]), name


# --- building -------------------------------------------------------------------------------------


def test_layers_are_built_as_the_spec_says_and_allocate_nothing():
    cache = kvrack.create_cache("plain", MIXED, growth=1.5)
    assert [type(layer).__name__ for layer in cache] == ["PlainLayer", "PlainLayer", "EmptyLayer", "PlainLayer"]
    assert [layer.spec for layer in cache] == list(MIXED.layers)
    assert cache.config.growth == 1.5
    assert cache.is_sliding == [False, True, False, True]
    assert cache.nbytes == 0
    assert cache.batch_size == -1
    assert not cache.is_initialized
    assert repr(cache) == "Cache('plain', 4 layers, 0 tokens, 0 bytes)"


@pytest.mark.parametrize(
    ("spec", "distribution"),
    [
        (ModelSpec(layers=(FULL, LayerSpec(attention=None, states=1))), "kvrack-mamba"),
        (ModelSpec(layers=(LayerSpec(states=1),)), "kvrack-mamba"),
        (ModelSpec(layers=(FULL,), cross_layers=(FULL,)), "kvrack-encoder-decoder"),
    ],
)
def test_a_missing_companion_is_named_with_its_pip_line(monkeypatch, spec, distribution):
    monkeypatch.setattr("kvrack.companions.installed", lambda: {"plain": ()})
    with pytest.raises(kvrack.UnsupportedOperation, match=f"^plain: .* pip install {distribution}$"):
        kvrack.create_cache("plain", spec)


def test_layers_are_created_on_demand_where_the_spec_has_further_ones():
    cache = kvrack.create_cache("plain", ModelSpec(further=SLIDING))
    assert len(cache) == 0
    assert cache.get_seq_length() == 0
    assert cache.get_seq_length(5) == 0
    assert cache.get_mask_sizes(3, 1) == (3, 0)
    assert cache.get_max_length() == -1
    assert cache.capabilities.slides
    cache.update(*states(3), layer_idx=0)
    cache.update(*states(3), layer_idx=2)
    assert len(cache) == 3
    assert [layer.spec for layer in cache] == [SLIDING] * 3
    assert [cache.get_seq_length(index) for index in range(4)] == [3, 0, 3, 0]
    assert cache.get_mask_sizes(2, 2) == (5, 0)


def test_a_layer_past_the_spec_is_refused():
    cache = kvrack.create_cache("plain", ModelSpec.uniform(2))
    with pytest.raises(IndexError, match="layer 2: the cache has 2 layers, as its model spec says"):
        cache.update(*states(1), layer_idx=2)


# --- layers that hold nothing ---------------------------------------------------------------------


def test_a_layer_that_holds_nothing_refuses_tokens_and_answers_for_the_first_that_attends():
    cache = kvrack.create_cache("plain", ModelSpec(layers=(NOTHING, FULL)))
    cache.update(*states(5), layer_idx=1)
    assert cache.get_seq_length(0) == cache.get_seq_length(1) == cache.get_seq_length() == 5
    assert cache.get_mask_sizes(2, 0) == (7, 0)
    with pytest.raises(kvrack.UnsupportedOperation) as caught:
        cache.update(*states(1), layer_idx=0)
    assert str(caught.value) == (
        "plain: update of layer 0, which its model spec says holds nothing, is not supported. "
        "Correct the spec or the layer index"
    )
    assert cache.layers[0].keys is None
    with pytest.raises(kvrack.UnsupportedOperation, match="holds nothing"):
        cache.layers[0].update(*states(1))


def test_layers_that_hold_nothing_decide_nothing_for_the_others():
    cache = kvrack.create_cache("plain", ModelSpec(layers=(NOTHING, FULL, NOTHING)))
    feed(cache, 5)
    cache.crop(-2)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0]))
    cache.offload(0)
    cache.prefetch(0)
    assert cache.batch_size == 1
    assert cache.get_seq_length() == 3
    assert cache.is_initialized
    assert cache.is_croppable
    assert {row.layer for row in cache.memory()} == {1}
    cache.reset()
    assert cache.get_seq_length() == 0


def test_a_model_none_of_whose_layers_attends_has_no_length():
    cache = kvrack.create_cache("plain", ModelSpec(layers=(NOTHING, NOTHING)))
    assert cache.get_seq_length() == 0
    assert cache.get_max_length() == -1
    assert not cache.is_initialized


# --- lengths --------------------------------------------------------------------------------------


def test_lengths_and_masks_of_full_and_windowed_layers():
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 9)
    assert [cache.get_seq_length(index) for index in (0, 1, 3)] == [9, 9, 9]
    assert all(type(cache.get_seq_length(index)) is int for index in range(4))
    assert cache.get_mask_sizes(2, 0) == (11, 0)
    assert cache.get_mask_sizes(2, 1) == (7, 4)
    assert cache.get_mask_sizes(2, 3) == (5, 6)
    for index in (0, 1, 3):
        length, _ = cache.get_mask_sizes(2, index)
        keys, values = cache.update(*states(2), index)
        assert keys.shape[2] == values.shape[2] == length


def test_the_smallest_limit_is_the_caches_and_a_window_is_none():
    cache = kvrack.create_cache("plain", MIXED, capacity=64)
    assert cache.get_max_length() == 64
    assert cache.get_max_length(1) == 64
    cache.layers[3]._capacity = 32
    assert cache.get_max_length() == 32
    assert cache.get_max_length(0) == 64
    assert cache.get_max_length(2) == -1
    assert kvrack.create_cache("plain", MIXED).get_max_length() == -1


def test_max_length_bounds_the_room_made():
    cache = kvrack.create_cache("plain", ModelSpec.uniform(1), max_length=20)
    feed(cache, 18)
    assert cache.nbytes == 2 * (2 * 2 * 20 * 4) * 4


# --- early initialization -------------------------------------------------------------------------


def test_early_initialization_allocates_every_layer_alike():
    cache = kvrack.create_cache("plain", MIXED)
    cache.early_initialization(3, 2, 4, torch.float16, CPU)
    assert cache.is_initialized
    assert cache.batch_size == 3
    for index in (0, 1, 3):
        assert cache.layers[index].keys.shape == cache.layers[index].values.shape == (3, 2, 0, 4)
        assert cache.layers[index].keys.dtype == torch.float16
    assert cache.get_seq_length() == 0


def test_early_initialization_takes_a_number_for_each_layer():
    cache = kvrack.create_cache("plain", ModelSpec(layers=(FULL, NOTHING, SLIDING)))
    cache.early_initialization(1, [2, 0, 3], [4, 0, 8], torch.float32, CPU, value_head_dim=[6, 0, 5])
    assert cache.layers[0].keys.shape == (1, 2, 0, 4)
    assert cache.layers[0].values.shape == (1, 2, 0, 6)
    assert cache.layers[2].keys.shape == (1, 3, 0, 8)
    assert cache.layers[2].values.shape == (1, 3, 0, 5)


@pytest.mark.parametrize(
    ("heads", "dims", "text"),
    [
        ([2], 4, "num_heads: expected one number or 2, one a layer, got 1"),
        (2, [4, 4, 4], "head_dim: expected one number or 2, one a layer, got 3"),
    ],
)
def test_early_initialization_refuses_lists_of_another_length_and_allocates_nothing(heads, dims, text):
    cache = kvrack.create_cache("plain", ModelSpec.uniform(2))
    with pytest.raises(ValueError, match=text):
        cache.early_initialization(1, heads, dims, torch.float32, CPU)
    assert cache.nbytes == 0


# --- crop -----------------------------------------------------------------------------------------


def test_crop_leaves_what_fewer_tokens_would_have_left():
    long, short = (kvrack.create_cache("plain", ModelSpec(layers=(FULL, FULL))) for _ in range(2))
    feed(short, 6)
    for index in range(2):
        keys, values = states(6, seed=index)
        more_keys, more_values = states(3, seed=7)
        long.update(torch.cat([keys, more_keys], 2), torch.cat([values, more_values], 2), index)
    long.crop(-3)
    assert_same(held(long), held(short))


def test_crop_is_done_in_every_layer_or_in_none():
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 9)
    before = held(cache)
    assert not cache.is_croppable
    with pytest.raises(kvrack.UnsupportedOperation, match="Call activate_past_recording"):
        cache.crop(-3)
    assert_same(held(cache), before)


def test_past_recording_lets_every_layer_crop():
    cache, short = (kvrack.create_cache("plain", MIXED) for _ in range(2))
    for each in (cache, short):
        each.activate_past_recording()
        feed(each, 9, seed=1)
    feed(cache, 5, seed=2)
    assert cache.is_croppable
    cache.crop(-5)
    short.crop(0)
    assert_same(held(cache), held(short))


def test_crop_of_more_than_there_is_empties_and_zero_removes_none():
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 9)
    cache.crop(0)
    assert cache.get_seq_length() == 9
    cache.crop(-20)
    assert [cache.get_seq_length(index) for index in range(4)] == [0, 0, 0, 0]
    feed(cache, 2)
    assert cache.get_seq_length() == 2


def test_a_positive_crop_is_refused_with_what_was_meant():
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 4)
    with pytest.raises(ValueError, match=r"crop\(3\): expected 0 or a negative number.*Call crop\(-3\)"):
        cache.crop(3)
    assert cache.get_seq_length() == 4


# --- batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "by_hand"),
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda t: t[[1, 1]]),
        (lambda cache: cache.batch_repeat_interleave(3), lambda t: t.repeat_interleave(3, 0)),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda t: t[[1]]),
        (lambda cache: cache.batch_select_indices(torch.tensor([False, True])), lambda t: t[[1]]),
    ],
)
def test_batch_operations_follow_in_every_tensor_and_updates_go_on(operation, by_hand):
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 9)
    before = held(cache)
    operation(cache)
    for (old, _), layer in zip(before, cache, strict=True):
        for name, tensor in layer.storage().items():
            assert torch.equal(tensor, by_hand(old[name]))
    feed(cache, 1, seed=1, batch=cache.batch_size)
    assert cache.get_seq_length() == 10


def test_a_batch_operation_out_of_range_changes_nothing():
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 5)
    before = held(cache)
    with pytest.raises((IndexError, RuntimeError)):
        cache.batch_select_indices(torch.tensor([0, 2]))
    assert_same(held(cache), before)


def test_reset_serves_any_shape_as_new():
    cache, fresh = (kvrack.create_cache("plain", MIXED) for _ in range(2))
    feed(cache, 9)
    cache.reset()
    assert cache.nbytes == 0
    assert cache.get_seq_length() == 0
    for each in (cache, fresh):
        for index in (0, 1, 3):
            each.update(torch.ones(1, 3, 2, 8).half(), torch.ones(1, 3, 2, 5).half(), index)
    assert_same(held(cache), held(fresh))


# --- memory ---------------------------------------------------------------------------------------


def test_memory_reports_real_bytes_by_layer_role_and_device():
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 9)
    rows = cache.memory()
    assert [(row.layer, row.role, row.device) for row in rows] == [
        (index, role, "cpu") for index in (0, 1, 3) for role in ("keys", "values")
    ]
    for row in rows:
        memory = cache.layers[row.layer].storage()[row.role].untyped_storage()
        assert row.nbytes == memory.nbytes()
    assert cache.nbytes == sum(row.nbytes for row in rows) == sum(layer.nbytes for layer in cache)
    assert cache.nbytes > sum(t.numel() * t.element_size() for storage, _ in held(cache) for t in storage.values())


def test_memory_that_two_tensors_share_is_counted_once():
    memory = torch.zeros(10, dtype=torch.float32)
    assert allocations({"a": memory[:4], "b": memory[4:], "c": torch.zeros(3)}) == {"a": 40, "b": 0, "c": 12}
    cache = kvrack.create_cache("plain", ModelSpec.uniform(2))
    feed(cache, 5)
    alone = cache.nbytes
    cache.layers[1]._keys.data = cache.layers[0]._keys.data
    assert cache.nbytes == alone * 3 // 4
    assert [row.nbytes > 0 for row in cache.memory()] == [True, True, False, True]


def test_offload_and_prefetch_keep_what_is_held():
    cache = kvrack.create_cache("plain", MIXED)
    feed(cache, 9)
    before = held(cache)
    cache.offload(1)
    assert_same(held(cache), before)
    cache.prefetch(1)
    assert_same(held(cache), before)


def test_a_dropped_cache_gives_back_its_memory():
    cache = kvrack.create_cache("plain", ModelSpec.uniform(1))
    feed(cache, 5)
    alive = weakref.ref(cache.layers[0]._keys.data)
    del cache
    gc.collect()
    assert alive() is None


# --- copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [kvrack.Cache.fork, copy.deepcopy], ids=["fork", "deepcopy"])
def test_a_copy_has_the_same_state_and_is_independent(copied):
    cache = kvrack.create_cache("plain", MIXED, growth=2.0, max_length=100)
    cache.activate_past_recording()
    feed(cache, 9)
    before = held(cache)
    twin = copied(cache)
    assert_same(held(twin), before)
    assert (twin.name, twin.config, twin.max_length, twin.model_spec) == ("plain", cache.config, 100, MIXED)
    feed(twin, 3, seed=1)
    assert_same(held(cache), before)
    feed(cache, 2, seed=2)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (11, 12)
    twin.crop(-3)
    assert twin.get_seq_length() == 9


def test_a_fork_of_a_lazily_created_cache_has_its_layers():
    cache = kvrack.create_cache("plain", ModelSpec(further=FULL))
    cache.update(*states(3), layer_idx=1)
    twin = cache.fork()
    assert_same(held(twin), held(cache))
    twin.update(*states(3), layer_idx=2)
    assert (len(cache), len(twin)) == (2, 3)


def test_a_copy_of_an_empty_or_merely_allocated_cache_serves_as_new():
    cache = kvrack.create_cache("plain", MIXED)
    assert cache.fork().nbytes == 0
    cache.early_initialization(2, 2, 4, torch.float32, CPU)
    twin = cache.fork()
    feed(twin, 4)
    assert (cache.get_seq_length(), twin.get_seq_length()) == (0, 4)


def test_a_cache_filled_with_grad_is_copied_detached():
    cache = kvrack.create_cache("plain", ModelSpec.uniform(2))
    for index in range(2):
        keys, values = states(5, seed=index)
        returned, _ = cache.update(keys.requires_grad_(), values.requires_grad_(), index)
        assert returned.requires_grad
    twin = copy.deepcopy(cache)
    assert_same(held(twin), held(cache))
    assert not any(tensor.requires_grad for storage, _ in held(twin) for tensor in storage.values())


def test_one_deepcopy_of_two_references_makes_one_copy():
    cache = kvrack.create_cache("plain", ModelSpec.uniform(1))
    feed(cache, 2)
    first, second = copy.deepcopy([cache, cache])
    assert first is second
    assert first is not cache


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_written():
    cache = kvrack.create_cache("plain", ModelSpec.uniform(1))
    feed(cache, 5)
    before = held(cache)
    keys, values = states(1, batch=3)
    with pytest.raises(kvrack.ShapeMismatch, match="Call batch_repeat_interleave or batch_select_indices first"):
        cache.update(keys, values, 0)
    good, _ = states(1)
    with pytest.raises(kvrack.ShapeMismatch, match="values: the cache holds batch 2"):
        cache.update(good, values, 0)
    with pytest.raises(kvrack.ShapeMismatch, match="keys and values: expected the same batch, heads and tokens"):
        cache.update(good, states(2)[1], 0)
    assert_same(held(cache), before)
