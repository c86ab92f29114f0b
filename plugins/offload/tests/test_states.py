"""States travel when they are asked to, whole, and with what a model writes to them in place."""

from __future__ import annotations

import pytest
import torch

import kvrack

pytest.importorskip("kvrack_mamba", reason="states are kvrack-mamba's: pip install kvrack-mamba")
STATES = kvrack.LayerSpec(attention=None, states=1)
HYBRID = kvrack.LayerSpec(states=1)
MODEL = kvrack.ModelSpec(layers=(STATES, HYBRID, STATES, HYBRID, STATES))


def step(cache: kvrack.Cache, seed: int, new: int) -> list[torch.Tensor]:
    """Give every layer new tokens, as a model does, writing to its recurrent state in place; return what it sees."""
    generator = torch.Generator().manual_seed(seed)
    seen = []
    for layer in cache.layers:
        seen.append(layer.update_conv_state(torch.randn(2, 6, new, generator=generator), 0, 4).clone())
        state = layer.get_recurrent_state()
        if state is None:
            state = layer.update_recurrent_state(torch.randn(2, 3, 5, generator=generator))
        else:
            state.mul_(0.5).add_(torch.randn(2, 3, 5, generator=generator))
        seen.append(layer.get_recurrent_state().clone())
        if layer.spec.attention is not None:
            keys, values = torch.randn(2, 2, 2, new, 8, generator=generator)
            seen += [each.clone() for each in layer.update(keys, values)]
    return seen


@pytest.mark.parametrize("offload_states", [False, True])
def test_states_are_as_on_the_device(tmp_path, offload_states):
    place = {"tier": "disk", "folder": str(tmp_path), "offload_states": offload_states}
    cache, twin = kvrack.create_cache("offload", MODEL, 64, **place), kvrack.create_cache("dynamic", MODEL, 64)
    for seed, new in enumerate((9, 1, 1, 4, 1)):
        assert all(map(torch.equal, step(cache, seed, new), step(twin, seed, new)))
        if seed == 2:
            for each in (cache, twin):
                each.reorder_cache(torch.tensor([1, 0]))
    away = {row.layer for row in cache.memory() if row.device == "disk"}
    assert away >= ({0, 1, 2, 3} if offload_states else {1, 3})
    assert offload_states or not away & {0, 2, 4}
    for other in (cache.fork(), _loaded(cache, tmp_path / "saved.kv")):
        assert all(map(torch.equal, step(other, 80, 1), step(twin.fork(), 80, 1)))
    for each in (cache, twin):
        each.reset()
    assert all(map(torch.equal, step(cache, 90, 5), step(twin, 90, 5)))


def test_memory_says_of_each_part_of_a_hybrid_layer_where_it_is(tmp_path):
    model = kvrack.ModelSpec(layers=(HYBRID,) * 4)
    cache = kvrack.create_cache("offload", model, 64, tier="disk", folder=str(tmp_path), offload_states=True)
    step(cache, 0, 5)
    places = {
        (row.layer, row.role): row.device for row in cache.memory() if row.role.startswith(("attention", "states"))
    }
    assert {places[0, "attention.keys"], places[0, "states.recurrent.0"], places[0, "states.conv.0"]} == {"disk"}
    assert places[3, "states.recurrent.0"] == "cpu", "the newest two are still in the slots"


def _loaded(cache: kvrack.Cache, path) -> kvrack.Cache:
    cache.save(path)
    return kvrack.load(path)


def test_states_cropped_as_on_the_device(tmp_path):
    cache = kvrack.create_cache("offload", MODEL, 64, tier="disk", folder=str(tmp_path), offload_states=True)
    twin = kvrack.create_cache("dynamic", MODEL, 64)
    for each in (cache, twin):
        each.activate_past_recording()
        for seed, new in enumerate((9, 3)):
            generator = torch.Generator().manual_seed(seed)
            for layer in each.layers:
                layer.update_conv_state(torch.randn(2, 6, new, generator=generator), 0, 4)
                layer.update_recurrent_state(torch.randn(2, 3, 5, generator=generator))
                if layer.spec.attention is not None:
                    layer.update(*torch.randn(2, 2, 2, new, 8, generator=generator))
        each.crop(-3)
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert torch.equal(layer.get_recurrent_state(), other.get_recurrent_state())
        assert torch.equal(layer.get_conv_state(), other.get_conv_state())
