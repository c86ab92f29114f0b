"""The preallocated backend: full, sliding and chunked layers against plain concatenation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils import _pytree

import kvrack
from kvrack import BuildContext, CapacityExceeded, InvalidConfig, LayerSpec, ModelSpec, ShapeMismatch
from kvrack.fixed import view_size
from kvrack_static.layer import StaticConfig, StaticLayer

WINDOW = 6
KINDS = {
    "full": LayerSpec(),
    "sliding": LayerSpec(attention="sliding", window=WINDOW),
    "chunked": LayerSpec(attention="chunked", window=WINDOW),
    "window 1": LayerSpec(attention="sliding", window=1),
    "window past capacity": LayerSpec(attention="sliding", window=100),
}
RINGS = ["sliding", "chunked", "window 1"]
SEQUENCES = [[1] * 20, [3, 1, 1, 1, 1, 1, 1, 1], [5, 1, 1, 3, 1], [6, 1, 1], [7, 1, 2, 1], [13, 1, 1, 9, 2, 1]]


def build(kind: str = "full", max_length: int | None = 64, **config) -> StaticLayer:
    return StaticLayer(KINDS[kind], StaticConfig(**config), BuildContext(backend="static", max_length=max_length))


def states(new: int, seed: int = 0, batch: int = 2, heads: int = 2, key_dim: int = 8, value_dim: int = 8):
    generator = torch.Generator().manual_seed(1000 * seed + new)
    return (
        torch.randn(batch, heads, new, key_dim, generator=generator),
        torch.randn(batch, heads, new, value_dim, generator=generator),
    )


class Reference:
    """All tokens given, to tell what a slot at a position must be."""

    def __init__(self, layer: StaticLayer) -> None:
        self.layer = layer
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Update the layer, and compare what it returns with the tokens at the positions its mask sizes say."""
        length, offset = self.layer.get_mask_sizes(keys.shape[2])
        returned = self.layer.update(keys, values)
        self.given.append((keys, values))
        for got, everything in zip(returned, self.everything(), strict=True):
            seen, window = everything.shape[2], self.layer.spec.window
            assert got.shape[2] == length
            assert torch.isfinite(got).all(), "a slot without a token must not turn attention into NaN"
            used = seen - offset
            assert 0 < used <= length
            assert torch.equal(got[:, :, :used], everything[:, :, offset:])
            visible = seen if window is None else min(seen, window - 1 + keys.shape[2])
            assert used >= visible, "a token that a query may see is missing"

    def everything(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*self.given, strict=True)
        return torch.cat(keys, 2), torch.cat(values, 2)


# --- what update returns ----------------------------------------------------------------------------


@pytest.mark.parametrize("attend_prefix", [True, False])
@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_slots_stand_for_the_positions_that_mask_sizes_say(kind, sequence, attend_prefix):
    reference = Reference(build(kind, attend_prefix=attend_prefix))
    for step, new in enumerate(sequence):
        reference.update(*states(new, seed=step))
        assert reference.layer.get_seq_length() == sum(sequence[: step + 1])
        assert type(reference.layer.get_seq_length()) is int


@pytest.mark.parametrize("kind", RINGS)
def test_a_ring_goes_round_many_times(kind):
    reference = Reference(build(kind))
    for step in range(200):
        reference.update(*states(1 + step % 4 // 3, seed=step))


def test_a_full_window_is_one_view_of_the_ring():
    layer = build("sliding")
    layer.update(*states(9))
    memory = layer._keys.data.untyped_storage().data_ptr()
    for step in range(2 * WINDOW):
        keys, _ = layer.update(*states(1, seed=step))
        assert keys.shape[2] == WINDOW
        assert keys.untyped_storage().data_ptr() == memory, "a copy of the window was returned"


@pytest.mark.parametrize("kind", KINDS)
def test_heads_dims_may_differ(kind):
    reference = Reference(build(kind))
    for step in range(12):
        reference.update(*states(1 + 3 * (step == 0), seed=step, key_dim=24, value_dim=16))


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_gradient_flows_through_the_new_tokens_only(kind):
    layer = build(kind)
    for step in range(9):
        keys, values = (each.requires_grad_() for each in states(1, seed=step))
        seen_keys, seen_values = layer.update(keys, values)
        (seen_keys.sum() + 2 * seen_values.sum()).backward()
        assert torch.equal(keys.grad, torch.ones_like(keys))
        assert torch.equal(values.grad, 2 * torch.ones_like(values))
        assert not layer.storage()["keys"].requires_grad


# --- sizes and capacity -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "capacity", "size"),
    [
        (1, 64, 64),
        (1, 4096, 256),
        (256, 4096, 256),
        (257, 4096, 512),
        (2049, 4096, 4096),
        (600, 1000, 1000),
        (513, 600, 600),
        (300, 300, 300),
    ],
)
def test_view_sizes_are_powers_of_two_from_256_then_capacity(tokens, capacity, size):
    assert view_size(tokens, capacity) == size


def test_attention_is_shown_what_is_used_and_not_the_capacity():
    layer = build(max_cache_len=2000)
    keys, _ = layer.update(*states(200))
    assert keys.shape[2] == 256
    keys, _ = layer.update(*states(100))
    assert keys.shape[2] == 512
    whole = build(max_cache_len=2000, attend_prefix=False)
    assert whole.update(*states(5))[0].shape[2] == 2000
    assert whole.get_mask_sizes(1) == (2000, 0)


def test_capacity_is_from_config_else_from_the_context():
    assert build(max_length=64).get_max_length() == 64
    assert build(max_length=64, max_cache_len=32).get_max_length() == 32
    with pytest.raises(InvalidConfig, match=r"'static'.*max_cache_len"):
        build(max_length=None)
    assert build("sliding", max_length=None).get_max_length() == -1


@pytest.mark.parametrize("kind", ["full", "window past capacity"])
@pytest.mark.parametrize(("held", "asked"), [(60, 5), (64, 1), (0, 65)])
def test_past_capacity_is_refused_before_anything_is_written(kind, held, asked):
    layer = build(kind)
    if held:
        layer.update(*states(held))
    before = {name: tensor.clone() for name, tensor in layer.storage().items()}
    for ask in (lambda: layer.get_mask_sizes(asked), lambda: layer.update(*states(asked, seed=1))):
        with pytest.raises(CapacityExceeded, match=rf"capacity is 64 tokens, {held} are held and {asked} more"):
            ask()
    assert layer.get_seq_length() == held
    assert layer.storage().keys() == before.keys()
    for name, tensor in layer.storage().items():
        assert torch.equal(tensor, before[name])


def test_a_model_learns_of_the_capacity_before_its_first_layer_is_written():
    spec = ModelSpec(layers=(LayerSpec(attention="sliding", window=WINDOW), LayerSpec()))
    cache = kvrack.create_cache("static", spec, max_cache_len=10)
    for layer in range(2):
        cache.update(*states(10), layer)
    assert cache.get_max_length() == 10
    with pytest.raises(CapacityExceeded):
        cache.get_mask_sizes(1, 1)
    assert cache.get_seq_length(0) == 10


def test_states_of_another_shape_are_refused():
    layer = build()
    layer.update(*states(3))
    with pytest.raises(ShapeMismatch, match="batch 2"):
        layer.update(*states(1, batch=3))
    assert layer.get_seq_length() == 3


# --- memory -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_addresses_are_kept_for_life(kind):
    layer = build(kind)
    layer.early_initialization(2, 2, 8, 8, torch.float32, torch.device("cpu"))
    addresses = {name: tensor.untyped_storage().data_ptr() for name, tensor in layer.storage().items()}
    layer.update(*states(3))
    for step in range(10):
        layer.update(*states(1, seed=step))
    layer.reorder_cache(torch.tensor([1, 0]))
    layer.reset()
    layer.update(*states(9))
    layer.crop(-20)
    layer.update(*states(2))
    assert {name: each.untyped_storage().data_ptr() for name, each in layer.storage().items()} == addresses


@pytest.mark.parametrize("kind", KINDS)
def test_after_reset_any_batch_and_shape_is_served(kind):
    layer = build(kind)
    layer.update(*states(9, batch=2))
    layer.reset()
    assert layer.get_seq_length() == 0
    reference = Reference(layer)
    for step in range(9):
        reference.update(*states(1, seed=step, batch=1, heads=3, key_dim=4))
    layer.reset()
    layer.early_initialization(4, 2, 8, 8, torch.float32, torch.device("cpu"))
    Reference(layer).update(*states(2, batch=4))


def test_a_ring_takes_memory_for_twice_its_window_whatever_the_capacity():
    layer = build("sliding", max_cache_len=5000)
    layer.update(*states(9))
    assert layer.nbytes == 2 * 2 * (2 * 2 * WINDOW * 8) * 4


# --- crop and recording -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("removed", [1, 3, 5, 6, 12])
def test_crop_after_recording_leaves_what_fewer_tokens_would_have(kind, removed):
    layer, twin = build(kind), build(kind)
    layer.activate_past_recording()
    for step in range(12):
        layer.update(*states(1, seed=step))
        if step < 12 - removed:
            twin.update(*states(1, seed=step))
    layer.crop(-removed)
    for step in range(3):
        assert layer.get_mask_sizes(1) == twin.get_mask_sizes(1)
        length, offset = layer.get_mask_sizes(1)
        used = layer.get_seq_length() + 1 - offset
        for got, expected in zip(
            layer.update(*states(1, seed=50 + step)), twin.update(*states(1, seed=50 + step)), strict=True
        ):
            assert got.shape[2] == length
            assert torch.equal(got[:, :, :used], expected[:, :, :used])


def test_recording_may_begin_on_a_full_ring():
    layer = build("sliding")
    reference = Reference(layer)
    reference.update(*states(20))
    layer.activate_past_recording()
    for step in range(5):
        reference.update(*states(1, seed=step))
    layer.crop(-5)
    assert layer.get_seq_length() == 20
    reference.given = reference.given[:1]
    reference.update(*states(2, seed=9))
    layer.crop(0)
    with pytest.raises(kvrack.UnsupportedOperation, match="records_past"):
        layer.crop(-1)


@pytest.mark.parametrize("kind", RINGS)
def test_a_ring_that_dropped_tokens_refuses_crop(kind):
    layer = build(kind)
    layer.update(*states(9))
    assert not layer.is_croppable
    with pytest.raises(kvrack.UnsupportedOperation, match=r"records_past.*\n?.*activate_past_recording"):
        layer.crop(-1)
    assert layer.get_seq_length() == 9
    layer.crop(-30)
    assert layer.get_seq_length() == 0


def test_recording_without_a_capacity_is_refused():
    layer = build("sliding", max_length=None)
    assert not layer.capabilities.records_past
    with pytest.raises(kvrack.UnsupportedOperation, match=r"records_past.*max_cache_len"):
        layer.activate_past_recording()


@pytest.mark.parametrize("record", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_continues_the_same(kind, record):
    layer = build(kind)
    if record:
        layer.activate_past_recording()
    for step in range(9):
        layer.update(*states(1, seed=step))
    if record:
        layer.crop(-2)
    twin = copy.deepcopy(layer)
    for step in range(8):
        for mine, its in zip(layer.update(*states(1, seed=step)), twin.update(*states(1, seed=step)), strict=True):
            _, offset = layer.get_mask_sizes(1)
            used = layer.get_seq_length() - offset
            assert torch.equal(mine[:, :, :used], its[:, :, :used])


# --- pytrees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["static"])
@pytest.mark.parametrize("prompt", [0, 4, 9])
def test_a_pytree_keeps_kinds_windows_and_lengths(backend, prompt):
    spec = ModelSpec(layers=(KINDS["full"], KINDS["sliding"], KINDS["chunked"], LayerSpec(attention=None)))
    cache = kvrack.create_cache(backend, spec, max_length=64)
    for layer in range(3):
        if prompt:
            cache.update(*states(prompt, seed=layer), layer)
    leaves, structure = _pytree.tree_flatten(cache)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    again = _pytree.tree_unflatten(leaves, structure)
    assert again.model_spec == spec
    assert [type(layer) for layer in again.layers] == [type(layer) for layer in cache.layers]
    assert [layer.spec for layer in again.layers] == [layer.spec for layer in cache.layers]
    assert [again.get_seq_length(i) for i in range(3)] == [prompt] * 3
    for layer in range(3):
        assert again.get_mask_sizes(2, layer) == cache.get_mask_sizes(2, layer)
    if prompt:
        for layer in range(3):
            assert torch.equal(again.layers[layer].keys, cache.layers[layer].keys)
    assert _pytree.tree_flatten(again)[1] == structure


# --- compiled ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "first", "most_graphs"), [("full", 250, 2), ("sliding", 3, 2), ("chunked", 9, 1)])
def test_a_compiled_update_needs_one_graph_for_each_size(kind, first, most_graphs):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    layer, eager = build(kind, max_cache_len=600), build(kind, max_cache_len=600)

    def step(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return layer.update(keys, values)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    layer.update(*states(first))
    eager.update(*states(first))
    for index in range(20):
        got = compiled(*states(1, seed=index))
        expected = eager.update(*states(1, seed=index))
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])
        assert layer.get_seq_length() == first + index + 1
        assert type(layer.get_seq_length()) is int
    assert counters["stats"]["unique_graphs"] == most_graphs
    assert not counters["graph_break"]
