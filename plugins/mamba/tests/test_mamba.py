"""States that roll back or refuse to, layers that hold attention beside them, and what is built of which backend."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch

import kvrack
from kvrack import LayerSpec, ModelSpec

KERNEL = 4
STATES = LayerSpec(attention=None, states=1)
HYBRID = LayerSpec(states=1)
ALTERNATING = ModelSpec(layers=(STATES, LayerSpec(), HYBRID), max_length=64)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def state_layer(name: str = "mamba", states: int = 1, **config):
    return kvrack.create_cache(name, ModelSpec(layers=(LayerSpec(attention=None, states=states),)), **config).layers[0]


def feed(layer, forwards: Iterable[int], seed: int = 0) -> list[torch.Tensor]:
    """Give a state layer forwards of so many tokens, the recurrent state changing with each; return the columns."""
    given = []
    for step, tokens in enumerate(forwards):
        given.append(draw(2, 3, tokens, seed=seed + step))
        layer.update_conv_state(given[-1], 0, KERNEL)
        past = layer.get_recurrent_state()
        layer.update_recurrent_state(draw(2, 5, seed=seed + step) + (0 if past is None else past))
    return given


def fill(cache: kvrack.Cache, tokens: int, seed: int = 0, batch: int = 2) -> None:
    """Give every layer of `ALTERNATING` `tokens` tokens."""
    for index, spec in enumerate(cache.model_spec.layers):
        if spec.attention is not None:
            cache.update(draw(batch, 2, tokens, 16, seed=seed), draw(batch, 2, tokens, 16, seed=seed + 1), index)
        if spec.states:
            cache.update_conv_state(draw(batch, 3, tokens, seed=seed), index, conv_kernel_size=KERNEL)
            cache.update_recurrent_state(draw(batch, 5, seed=seed), index)


def held(cache: kvrack.Cache) -> dict[str, torch.Tensor]:
    return {f"{i}.{name}": each.clone() for i, layer in enumerate(cache) for name, each in layer.storage().items()}


def assert_equal(seen: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == wanted.keys()
    for name, tensor in seen.items():
        assert torch.equal(tensor, wanted[name]), name


# --- states ---------------------------------------------------------------------------------------


def test_a_prompt_shorter_than_the_kernel_is_padded_on_the_left():
    layer = state_layer()
    columns = draw(2, 3, 2)
    padded = torch.nn.functional.pad(columns, (2, 0))
    assert torch.equal(layer.update_conv_state(columns, 0, KERNEL), padded)
    assert torch.equal(layer.get_conv_state(), padded)


def test_states_stay_where_they_are_until_reset():
    layer = state_layer()
    feed(layer, (9, 1))
    addresses = {name: tensor.data_ptr() for name, tensor in layer.storage().items()}
    feed(layer, (1, 4), seed=9)
    layer.reorder_cache(torch.tensor([1, 0]))
    assert {name: tensor.data_ptr() for name, tensor in layer.storage().items()} == addresses
    assert layer.nbytes == 2 * 3 * KERNEL * 4 + 2 * 5 * 4
    layer.reset()
    assert layer.nbytes == 0


def test_states_that_do_not_fit_are_refused_and_change_nothing():
    layer = state_layer()
    feed(layer, (5,))
    before = {name: tensor.clone() for name, tensor in layer.storage().items()}
    with pytest.raises(kvrack.ShapeMismatch, match=r"holds batch 2, 3 channels in torch.float32, got batch 3"):
        layer.update_conv_state(draw(3, 3, 1))
    with pytest.raises(kvrack.ShapeMismatch, match=r"expected \[batch, channels, tokens\], got \(2, 3\)"):
        layer.update_conv_state(draw(2, 3))
    with pytest.raises(kvrack.ShapeMismatch, match=r"recurrent state: the cache holds \(2, 5\), got \(2, 6\)"):
        layer.update_recurrent_state(draw(2, 6))
    with pytest.raises(IndexError, match="state 1: the layer has 1"):
        layer.get_conv_state(1)
    assert_equal(dict(layer.storage()), before)


def test_a_state_keeps_the_dtype_of_its_first_update():
    layer = state_layer()
    layer.update_recurrent_state(draw(2, 5))
    assert layer.update_recurrent_state(draw(2, 5).double()).dtype == torch.float32


def test_gradient_flows_through_what_an_update_brings_and_no_further():
    layer = state_layer()
    given = [draw(2, 3, tokens, seed=tokens).requires_grad_() for tokens in (5, 1)]
    layer.update_conv_state(given[0], 0, KERNEL)
    (layer.update_conv_state(given[1], 0, KERNEL) ** 2).sum().backward()
    assert given[0].grad is None
    assert given[1].grad is not None
    assert not any(tensor.requires_grad for tensor in layer.storage().values())


# --- going back -----------------------------------------------------------------------------------


def test_convolution_states_go_back_by_any_number_of_tokens():
    layer = state_layer()
    layer.activate_past_recording()
    columns = [draw(2, 3, tokens, seed=tokens) for tokens in (3, 1, 4)]
    for each in columns:
        layer.update_conv_state(each, 0, KERNEL)
    everything = torch.nn.functional.pad(torch.cat(columns, dim=-1), (KERNEL, 0))
    for tokens in range(1, 8):
        cropped = copy.deepcopy(layer)
        cropped.crop(-tokens)
        assert torch.equal(cropped.get_conv_state(), everything[..., -tokens - KERNEL : -tokens])
    layer.crop(-8)
    assert layer.get_conv_state() is None


@pytest.mark.parametrize(("recorded", "reached"), [(0, [8]), (1, [2, 8]), (2, [2, 3, 8]), (4, [2, 3, 8])])
def test_recurrent_states_go_back_to_where_a_held_forward_began(recorded, reached):
    layer = state_layer(recorded_states=recorded)
    layer.activate_past_recording()
    feed(layer, (5, 1, 2))
    before = {name: tensor.clone() for name, tensor in layer.storage().items()}
    went = []
    for tokens in range(1, 9):
        cropped = copy.deepcopy(layer)
        assert cropped.storage().keys() == before.keys()
        try:
            cropped.crop(-tokens)
        except kvrack.UnsupportedOperation:
            assert_equal(dict(cropped.storage()), before)
            continue
        went.append(tokens)
        twin = state_layer()
        feed(twin, {2: (5, 1), 3: (5,), 8: ()}[tokens])
        assert_equal(dict(cropped.storage()), dict(twin.storage()))
    assert went == reached


def test_the_refusal_says_where_to_and_what_to_call():
    layer = state_layer(recorded_states=2)
    feed(layer, (5,))
    with pytest.raises(kvrack.UnsupportedOperation, match=r"records_past.*Call activate_past_recording\(\) before"):
        layer.crop(-1)
    layer.activate_past_recording()
    feed(layer, (3, 2))
    with pytest.raises(kvrack.UnsupportedOperation, match=r"now by -2, -5: .*recorded_states higher, or reset"):
        layer.crop(-1)
    with pytest.raises(kvrack.UnsupportedOperation, match="Only 5 tokens are recorded"):
        layer.crop(-6)
    with pytest.raises(ValueError, match=r"crop\(2\): expected 0 or a negative number"):
        layer.crop(2)
    layer.crop(0)
    assert {name.partition(".")[2] for name in layer.storage()} == {"conv.0", "recurrent.0"}


def test_tokens_that_went_by_unrecorded_are_not_counted():
    layer = state_layer()
    layer.activate_past_recording()
    layer.update_conv_state(draw(2, 3, 5), 0, KERNEL)
    layer.update_conv_state(draw(2, 3, 2), 0, KERNEL)
    assert layer.is_croppable
    # A model that doesn't ask whether past is recorded takes its single-token step so.
    layer.get_conv_state().copy_(draw(2, 3, KERNEL, seed=9))
    assert not layer.is_croppable
    layer.update_conv_state(draw(2, 3, 1), 0, KERNEL)
    assert layer.is_croppable
    with pytest.raises(kvrack.UnsupportedOperation, match="Only 1 tokens are recorded"):
        layer.crop(-2)


def test_recorded_past_is_saved_and_goes_on(tmp_path):
    cache = kvrack.create_cache("dynamic", ALTERNATING)
    cache.activate_past_recording()
    for step, tokens in enumerate((5, 1)):
        fill(cache, tokens, seed=step)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kvrack.load(tmp_path / "cache.safetensors")
    for each in (cache, loaded):
        fill(each, 2, seed=7)
        each.crop(-3)
    assert_equal(held(loaded), held(cache))
    twin = kvrack.create_cache("dynamic", ALTERNATING)
    fill(twin, 5)
    assert_equal(held(cache), held(twin))


def test_crop_moves_every_layer_of_a_model_or_none():
    cache = kvrack.create_cache("dynamic", ALTERNATING)
    fill(cache, 5)
    before = held(cache)
    with pytest.raises(kvrack.UnsupportedOperation):
        cache.crop(-1)
    assert_equal(held(cache), before)
    assert cache.get_seq_length(1) == 5


# --- attention beside states ----------------------------------------------------------------------

BACKENDS = [name for name, info in kvrack.backends().items() if info.error is None and name != "encoder-decoder"]


@pytest.mark.parametrize("name", BACKENDS)
def test_any_backend_attends_and_states_stay_exact(name, tmp_path):
    cache = kvrack.create_cache(name, ALTERNATING, max_length=64)
    alone = kvrack.create_cache(name, ModelSpec.uniform(1), max_length=64)
    fill(cache, 5)
    alone.update(draw(2, 2, 5, 16), draw(2, 2, 5, 16, seed=1), 0)
    cache.batch_repeat_interleave(2)
    alone.batch_repeat_interleave(2)
    cache.fork().save(tmp_path / "cache.safetensors")
    cache = kvrack.load(tmp_path / "cache.safetensors")
    for index in (1, 2):
        assert torch.equal(cache.layers[index].keys, alone.layers[0].keys)
        assert torch.equal(cache.layers[index].values, alone.layers[0].values)
    for index in (0, 2):
        assert torch.equal(cache.get_recurrent_state(index), draw(2, 5).repeat_interleave(2, dim=0))
        assert cache.has_previous_state(index)
    assert cache.nbytes == sum(row.nbytes for row in cache.memory())
    assert cache.get_seq_length() == 5
    cache.reset()
    assert not cache.has_previous_state()


def test_roles_of_a_layer_with_both_parts():
    cache = kvrack.create_cache("mamba", ALTERNATING, attention="fp8") if "fp8" in BACKENDS else None
    cache = cache or kvrack.create_cache("mamba", ALTERNATING)
    fill(cache, 5)
    roles = {row.role.partition(".")[0] for row in cache.memory() if row.layer == 2}
    assert roles == {"attention", "states"}


def test_early_initialization_leaves_states_to_their_own_shapes():
    cache = kvrack.create_cache("dynamic", ALTERNATING)
    cache.early_initialization(2, 2, 16, torch.float32, torch.device("cpu"))
    assert [sorted(layer.storage()) for layer in cache] == [
        [],
        ["keys", "values"],
        ["attention.keys", "attention.values"],
    ]
    fill(cache, 5)
    assert cache.get_conv_state(0).shape == (2, 3, KERNEL)


def test_what_attention_refuses_is_refused_and_states_stay():
    cache = kvrack.create_cache("dynamic", ModelSpec(layers=(LayerSpec(attention="sliding", window=4, states=1),)))
    fill(cache, 9)
    cache.layers[0].states.activate_past_recording()
    fill(cache, 1, seed=3)
    before = held(cache)
    with pytest.raises(kvrack.UnsupportedOperation, match="past a window of 4"):
        cache.crop(-1)
    assert_equal(held(cache), before)


def test_a_fork_shares_what_attends_and_goes_its_own_way():
    cache = kvrack.create_cache("dynamic", ALTERNATING)
    fill(cache, 5)
    before, fork = held(cache), cache.fork()
    assert fork.layers[2].keys.data_ptr() == cache.layers[2].keys.data_ptr()
    assert fork.get_conv_state(2).data_ptr() != cache.get_conv_state(2).data_ptr()
    fill(fork, 1, seed=3)
    assert_equal(held(cache), before)
    twin = kvrack.create_cache("dynamic", ALTERNATING)
    fill(twin, 5)
    fill(twin, 1, seed=3)
    assert_equal(held(fork), held(twin))


def test_settings_are_checked_when_the_name_is_resolved():
    with pytest.raises(kvrack.InvalidConfig, match="'banana'"):
        kvrack.resolve("mamba", {"attention_config": {"banana": 1}})
    with pytest.raises(kvrack.InvalidConfig, match="unknown cache backend 'no-such'"):
        kvrack.resolve("mamba", {"attention": "no-such"})
    config = {"attention": "dynamic", "attention_config": {"growth": 2.0}}
    cache = kvrack.create_cache("mamba", ALTERNATING, **config)
    assert cache.layers[1].config.growth == cache.layers[2].attention.config.growth == 2.0
    assert config["attention_config"] == {"growth": 2.0}


# --- compiling ------------------------------------------------------------------------------------


def test_a_decode_step_compiles_without_a_break():
    layer = state_layer()
    eager = state_layer()
    for each in (layer, eager):
        feed(each, (5,))

    def step(layer, columns, recurrent):
        convolved = layer.update_conv_state(columns, 0, KERNEL).sum(-1)
        state = layer.get_recurrent_state()
        return convolved, layer.update_recurrent_state(state * 0.5 + recurrent)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    address = layer.get_conv_state().data_ptr()
    for seed in range(3):
        given = draw(2, 3, 1, seed=seed), draw(2, 5, seed=seed)
        for seen, wanted in zip(compiled(layer, *given), step(eager, *given), strict=True):
            assert torch.equal(seen, wanted)
    assert layer.get_conv_state().data_ptr() == address
