"""Two sides, each by any backend: what acts on both, what on the decoder's alone, and what room is made."""

from __future__ import annotations

import pytest
import torch

import kvrack
from kvrack import LayerSpec, ModelSpec

SLIDING = LayerSpec(attention="sliding", window=4)
MODEL = ModelSpec(layers=(LayerSpec(), SLIDING), cross_layers=(LayerSpec(), LayerSpec()))
ENCODED = 11
BACKENDS = [name for name, info in kvrack.backends().items() if info.error is None]


def draw(tokens: int, seed: int = 0, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + tokens)
    return tuple(torch.randn(batch, 2, tokens, 16, generator=generator) for _ in range(2))


def fill(cache: kvrack.Cache, tokens: int = 5) -> kvrack.Cache:
    """Give both sides of a cache for `MODEL` what a first step gives."""
    for index in range(2):
        cache.self_attention.update(*draw(tokens, seed=index), index)
        cache.cross_attention.update(*draw(ENCODED, seed=10 + index), index)
    return cache


def cross(cache: kvrack.Cache) -> list[torch.Tensor]:
    return [each.clone() for layer in cache.cross_attention for each in (layer.keys, layer.values)]


def assert_equal(seen: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(seen) == len(wanted)
    for left, right in zip(seen, wanted, strict=True):
        assert torch.equal(left, right)


# --- any backend ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_any_backend_serves_both_sides(name, tmp_path):
    cache = kvrack.create_cache(name, MODEL, max_length=64)
    assert cache.nbytes == 0
    alone = kvrack.create_cache(name, ModelSpec.uniform(1), max_length=ENCODED)
    for index in range(2):
        given = draw(ENCODED, seed=10 + index)
        returned = cache.cross_attention.update(*given, index)
        cache.self_attention.update(*draw(5, seed=index), index)
        alone.reset()
        alone.update(*given, 0)
        assert [each.shape[2] for each in returned] == [ENCODED, ENCODED]
        layer = cache.cross_attention.layers[index]
        assert_equal([layer.keys, layer.values], [alone.layers[0].keys, alone.layers[0].values])
    assert cache.get_seq_length() == 5
    held = cross(cache)
    cache.fork().save(tmp_path / "cache.safetensors")
    loaded = kvrack.load(tmp_path / "cache.safetensors")
    assert_equal(cross(loaded), held)
    for each in (cache, loaded):
        each.batch_repeat_interleave(2)
        each.reorder_cache(torch.tensor([3, 0, 1, 2]))
    rows = torch.tensor([1, 0, 0, 1])
    assert_equal(cross(loaded), [each[rows] for each in held])
    assert [layer.storage().keys() for layer in loaded] == [layer.storage().keys() for layer in cache]
    assert cache.nbytes == sum(row.nbytes for row in cache.memory())
    assert {row.layer for row in cache.memory()} >= {0, 1, 2, 3}
    cache.reset()
    assert [layer.get_seq_length() for layer in cache] == [0, 0, 0, 0]
    cache.cross_attention.update(*draw(3, batch=1), 0)
    assert cache.layers[2].keys.shape == (1, 2, 3, 16)


def test_two_backends_by_name():
    config = {"self_attention": "dynamic", "self_attention_config": {"growth": 2.0}, "cross_attention": "dynamic"}
    cache = fill(kvrack.create_cache("encoder-decoder", MODEL, **config))
    assert cache.layers[0].config.growth == 2.0
    assert cache.layers[2].inner.config.growth == 1.25
    with pytest.raises(kvrack.InvalidConfig, match="'banana'"):
        kvrack.resolve("encoder-decoder", {"cross_attention_config": {"banana": 1}})
    with pytest.raises(kvrack.InvalidConfig, match="'no-such'"):
        kvrack.resolve("encoder-decoder", {"self_attention": "no-such"})


def test_a_decoder_without_an_encoder_has_no_cross_attention():
    cache = kvrack.create_cache("encoder-decoder", ModelSpec.uniform(1))
    cache.update(*draw(3), 0)
    with pytest.raises(kvrack.UnsupportedOperation, match="cross-attention in a model without it"):
        _ = cache.cross_attention


# --- what acts on which side ----------------------------------------------------------------------


def test_crop_is_the_decoders_alone():
    cache = kvrack.create_cache("dynamic", MODEL)
    cache.activate_past_recording()
    fill(cache, 9)
    before = cross(cache)
    cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache] == [6, 6, ENCODED, ENCODED]
    cache.crop(-99)
    assert [layer.get_seq_length() for layer in cache] == [0, 0, ENCODED, ENCODED]
    assert_equal(cross(cache), before)
    with pytest.raises(ValueError, match=r"crop\(3\): expected 0 or a negative number"):
        cache.layers[2].crop(3)


def test_a_refused_crop_changes_neither_side():
    cache = fill(kvrack.create_cache("dynamic", MODEL), 9)
    with pytest.raises(kvrack.UnsupportedOperation, match="past a window of 4"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache] == [9, 9, ENCODED, ENCODED]


def test_a_second_encoders_output_is_refused_until_reset():
    cache = fill(kvrack.create_cache("dynamic", MODEL))
    before = cross(cache)
    with pytest.raises(kvrack.UnsupportedOperation, match=r"second update of cross-attention.*call reset\(\)"):
        cache.cross_attention.update(*draw(ENCODED), 0)
    assert_equal(cross(cache), before)


def test_limits_and_lengths_are_the_decoders():
    cache = fill(kvrack.create_cache("dynamic", MODEL, max_length=64))
    assert (cache.get_max_length(), cache.get_seq_length(), cache.is_compileable) == (-1, 5, False)
    assert len(cache.self_attention) == len(cache.cross_attention) == 2
    assert cache.get_mask_sizes(1) == (6, 0)


def test_a_missing_or_misshapen_output_is_refused_and_changes_nothing():
    cache = kvrack.create_cache("dynamic", MODEL)
    keys, values = draw(ENCODED)
    with pytest.raises(kvrack.ShapeMismatch):
        cache.cross_attention.update(keys[0], values[0], 0)
    with pytest.raises(kvrack.ShapeMismatch):
        cache.cross_attention.update(keys, values[:, :, 1:], 0)
    assert cache.nbytes == 0


# --- preallocated ---------------------------------------------------------------------------------

static = pytest.mark.skipif("static" not in BACKENDS, reason="kvrack-static is not installed")


@static
@pytest.mark.parametrize("config", [{}, {"max_cache_len": 7}])
def test_room_is_what_each_side_needs(config):
    cache = kvrack.create_cache("static", MODEL, max_length=7, **config)
    for index in range(2):
        cache.self_attention.update(*draw(5, seed=index), index)
        cache.cross_attention.update(*draw(600, seed=index), index)
    assert cache.layers[0].nbytes == 2 * 2 * 2 * 7 * 16 * 4
    assert cache.layers[2].nbytes == 2 * 2 * 2 * 600 * 16 * 4
    assert cache.layers[2].keys.shape[2] == 600
    assert cache.get_max_length() == 7
    assert cache.is_compileable


@static
def test_unused_slots_of_the_encoders_side_are_not_shown():
    cache = kvrack.create_cache(
        "encoder-decoder", MODEL, cross_attention="static", cross_attention_config={"max_cache_len": 300}
    )
    keys, values = cache.cross_attention.update(*draw(ENCODED), 0)
    assert keys.shape[2] == values.shape[2] == ENCODED
    with pytest.raises(kvrack.CapacityExceeded):
        cache.cross_attention.update(*draw(301), 1)


@static
def test_the_same_length_again_keeps_its_memory():
    cache = fill(kvrack.create_cache("static", MODEL, max_length=16))
    address = cache.layers[2].keys.data_ptr()
    cache.reset()
    fill(cache)
    assert cache.layers[2].keys.data_ptr() == address


# --- copies ---------------------------------------------------------------------------------------


def test_parts_share_the_layers_and_copies_do_not():
    cache = fill(kvrack.create_cache("dynamic", MODEL))
    assert cache.cross_attention.layers[1] is cache.layers[3]
    fork = cache.fork()
    before = cross(cache)
    # A branch shares the encoder's output, which nobody writes again.
    assert fork.layers[2].keys.data_ptr() == cache.layers[2].keys.data_ptr()
    fork.reset()
    assert_equal(cross(cache), before)


def test_as_a_pytree_both_sides_come_back():
    cache = fill(kvrack.create_cache("dynamic", MODEL))
    leaves, spec = torch.utils._pytree.tree_flatten(cache)
    assert len(leaves) == 8
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert_equal(cross(again), cross(cache))
    assert [layer.get_seq_length() for layer in again] == [5, 5, ENCODED, ENCODED]
