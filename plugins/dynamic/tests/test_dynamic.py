"""The growable backend: full, sliding and chunked layers against plain concatenation."""

from __future__ import annotations

import pytest
import torch

import kvrack
from kvrack import BuildContext, LayerSpec, ModelSpec
from kvrack_dynamic.layer import DynamicConfig, DynamicLayer

KINDS = {
    "full": LayerSpec(),
    "sliding": LayerSpec(attention="sliding", window=6),
    "chunked": LayerSpec(attention="chunked", window=6),
    "window 1": LayerSpec(attention="sliding", window=1),
}
WINDOWED = [name for name in KINDS if name != "full"]
PROMPTS = [1, 5, 6, 7, 40]
"""Lengths short of, at and past a window of 6, and far past it."""


def build(kind: str = "full", **config: float) -> DynamicLayer:
    return DynamicLayer(KINDS[kind], DynamicConfig(**config), BuildContext(backend="dynamic"))


def states(
    new: int,
    seed: int = 0,
    batch: int = 2,
    heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 8,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(batch, heads, new, key_dim, generator=generator).to(dtype),
        torch.randn(batch, heads, new, value_dim, generator=generator).to(dtype),
    )


def visible(everything: torch.Tensor, window: int | None, new: int) -> torch.Tensor:
    """Return what attention must see of all tokens so far, `new` of which just came."""
    if window is None:
        return everything
    return everything[:, :, max(0, everything.shape[2] - (window - 1 + new)) :]


# --- what update returns --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prompt", PROMPTS)
def test_updates_return_what_concatenation_would(kind, prompt):
    layer = build(kind)
    all_keys, all_values = states(0)
    for step, new in enumerate([prompt, 1, 1, 3, 1, 9, 1, 1]):
        keys, values = states(new, seed=step)
        all_keys, all_values = torch.cat([all_keys, keys], 2), torch.cat([all_values, values], 2)
        length, offset = layer.get_mask_sizes(new)
        returned = layer.update(keys, values)
        assert torch.equal(returned[0], visible(all_keys, layer.spec.window, new))
        assert torch.equal(returned[1], visible(all_values, layer.spec.window, new))
        assert returned[0].shape[2] == length
        assert offset == all_keys.shape[2] - length
        assert layer.get_seq_length() == all_keys.shape[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dtype_out_is_dtype_in(kind, dtype):
    layer = build(kind)
    for step in range(3):
        returned = layer.update(*states(4, seed=step, dtype=dtype))
        assert returned[0].dtype == returned[1].dtype == layer.keys.dtype == layer.values.dtype == dtype


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_of_different_head_dim(kind):
    layer = build(kind)
    everything = [states(new, seed=new, key_dim=24, value_dim=16) for new in (7, 1, 2)]
    for pair in everything:
        keys, values = layer.update(*pair)
    assert torch.equal(keys, visible(torch.cat([pair[0] for pair in everything], 2), layer.spec.window, 2))
    assert torch.equal(values, visible(torch.cat([pair[1] for pair in everything], 2), layer.spec.window, 2))
    layer.reorder_cache(torch.tensor([1, 0]))
    assert (layer.keys.shape[-1], layer.values.shape[-1]) == (24, 16)


@pytest.mark.parametrize("growth", [1.01, 1.25, 4.0])
def test_growth_changes_room_and_nothing_else(growth):
    layer, usual = build(growth=growth), build()
    for step in range(60):
        pair = states(1, seed=step)
        assert torch.equal(layer.update(*pair)[0], usual.update(*pair)[0])
    room = layer.keys.untyped_storage().nbytes() // (2 * 2 * 8 * 4)
    assert 60 <= room <= max(60 + 16, 60 * growth + 1)


@pytest.mark.parametrize("kind", WINDOWED)
@pytest.mark.parametrize("prompt", [40, 1])
def test_a_window_holds_window_minus_one_tokens_and_bounded_memory(kind, prompt):
    layer = build(kind)
    layer.update(*states(prompt))
    for step in range(200):
        layer.update(*states(1, seed=step))
    window = layer.spec.window
    assert layer.keys.shape[2] == layer.values.shape[2] == window - 1
    assert layer.keys.untyped_storage().nbytes() <= (window - 1 + 16) * 2 * 2 * 8 * 4
    assert layer.get_seq_length() == prompt + 200


# --- crop -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("removed", [1, 3, 8, 12])
def test_crop_with_recorded_past_leaves_what_fewer_tokens_would_have_left(kind, removed):
    layer, short = build(kind), build(kind)
    keys, values = states(20)
    for each, length in ((layer, 20), (short, 20 - removed)):
        each.activate_past_recording()
        each.update(keys[:, :, :7], values[:, :, :7])
        each.update(keys[:, :, 7:length], values[:, :, 7:length])
    layer.crop(-removed)
    short.crop(0)
    pair = states(2, seed=1)
    assert torch.equal(layer.keys, short.keys)
    assert layer.get_seq_length() == short.get_seq_length() == 20 - removed
    for left, right in zip(layer.update(*pair), short.update(*pair), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_crop_past_a_window_is_refused_and_changes_nothing(kind):
    layer = build(kind)
    layer.update(*states(9))
    before = layer.keys.clone()
    assert not layer.is_croppable
    with pytest.raises(kvrack.UnsupportedOperation) as caught:
        layer.crop(-3)
    assert str(caught.value) == (
        "dynamic: crop(-3) [records_past] past a window of 6, 9 tokens seen, is not supported. "
        "Call activate_past_recording() before the updates that may be cropped"
    )
    assert torch.equal(layer.keys, before)
    assert layer.get_seq_length() == 9


@pytest.mark.parametrize("kind", WINDOWED)
def test_crop_within_a_window_that_dropped_nothing_works(kind):
    layer = build(kind)
    window = layer.spec.window
    layer.update(*states(window - 1))
    layer.crop(-1)
    assert layer.get_seq_length() == max(0, window - 2)
    assert layer.is_croppable


@pytest.mark.parametrize("kind", KINDS)
def test_crop_of_more_than_there_is_empties(kind):
    layer = build(kind)
    layer.update(*states(3))
    layer.crop(-5)
    assert layer.get_seq_length() == layer.keys.shape[2] == 0
    keys, values = states(2, seed=1)
    assert torch.equal(layer.update(keys, values)[0], keys)


@pytest.mark.parametrize("kind", WINDOWED)
def test_crop_zero_frees_recorded_past(kind):
    layer = build(kind)
    layer.activate_past_recording()
    layer.update(*states(500))
    layer.update(*states(1))
    recorded = layer.nbytes
    layer.crop(0)
    assert layer.keys.shape[2] == layer.spec.window - 1
    assert layer.nbytes < recorded / 10
    assert layer.get_seq_length() == 501


# --- what it refuses ------------------------------------------------------------------------------


def test_another_batch_size_says_what_to_call():
    layer = build()
    layer.update(*states(4, batch=1))
    with pytest.raises(kvrack.ShapeMismatch) as caught:
        layer.update(*states(1, batch=3))
    assert str(caught.value) == (
        "keys: the cache holds batch 1, 2 heads, head_dim 8; got batch 3, 2 heads, head_dim 8. "
        "Call batch_repeat_interleave or batch_select_indices first, or reset()"
    )
    layer.batch_repeat_interleave(3)
    layer.update(*states(1, batch=3))
    assert layer.get_seq_length() == 5


@pytest.mark.parametrize("given", [{"heads": 3}, {"key_dim": 9}, {"value_dim": 9}, {"dtype": torch.float16}])
def test_states_of_another_shape_or_dtype_are_refused_and_nothing_is_written(given):
    layer = build()
    layer.update(*states(4))
    before = layer.keys.clone(), layer.values.clone()
    with pytest.raises(kvrack.ShapeMismatch, match=r"Call reset\(\) to start anew"):
        layer.update(*states(1, **given))
    assert torch.equal(layer.keys, before[0])
    assert torch.equal(layer.values, before[1])
    layer.reset()
    layer.update(*states(1, **given))
    assert layer.get_seq_length() == 1


@pytest.mark.parametrize("growth", [1.0, 0, -2, 4.5, "much", None])
def test_a_growth_out_of_range_is_refused(growth):
    with pytest.raises(kvrack.InvalidConfig, match="config of cache backend 'dynamic': growth: input should be"):
        kvrack.resolve("dynamic", {"growth": growth})


def test_an_unknown_key_names_the_valid_one():
    with pytest.raises(kvrack.InvalidConfig) as caught:
        kvrack.resolve("dynamic", {"growht": 2})
    assert str(caught.value) == (
        "config of cache backend 'dynamic': unknown key 'growht'. Valid keys: growth. Did you mean 'growth'?"
    )


# --- by its name ----------------------------------------------------------------------------------


def test_it_is_found_by_its_name():
    info = kvrack.backends()["dynamic"]
    assert info.distribution == "kvrack-dynamic"
    assert info.error is None
    assert info.summary
    assert kvrack.resolve("dynamic").config == DynamicConfig(growth=1.25)


def test_a_model_of_every_kind_of_layer():
    spec = ModelSpec(layers=(*KINDS.values(), LayerSpec(attention=None)))
    cache = kvrack.create_cache("dynamic", spec, growth=2.0)
    for index in range(len(KINDS)):
        cache.update(*states(9, seed=index), index)
    assert cache.get_seq_length() == 9
    assert {row.layer for row in cache.memory()} == set(range(len(KINDS)))
    with pytest.raises(kvrack.UnsupportedOperation, match="holds nothing"):
        cache.update(*states(1), layer_idx=len(KINDS))


def test_layers_are_created_when_first_updated():
    cache = kvrack.create_cache("dynamic", ModelSpec(further=KINDS["sliding"]))
    for index in (0, 3):
        keys, values = states(9, seed=index)
        assert torch.equal(cache.update(keys, values, index)[0], keys)
    assert len(cache) == 4
    assert cache.is_sliding == [True] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_grows_under_torch_compile_without_a_graph_break(kind):
    layer, eager = build(kind), build(kind)
    compiled = torch.compile(layer.update, backend="eager", fullgraph=True, dynamic=True)
    for step, new in enumerate([7, 1, 1, 1]):
        pair = states(new, seed=step)
        for left, right in zip(compiled(*pair), eager.update(*pair), strict=True):
            assert torch.equal(left, right)
    assert layer.get_seq_length() == 10
    assert type(layer.get_seq_length()) is int
