"""The cache: the layers of a model together."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import kvrack
from kvrack.layer import AttentionLayer
from kvrack.model import LayerSpec
from kvrack_spec.compare import Unchanged, expect_same, same_bits
from kvrack_spec.devices import OneDeviceAtATime, another_device
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.subject import KINDS, Shape, Subject, layer_spec

SHAPES = (Shape(), Shape(heads=3), Shape(key_dim=64, value_dim=64))


def _mixed(subject: Subject) -> kvrack.Cache:
    """Return a cache of three layers, windowed ones among them where they are served."""
    kinds = [kind for kind in KINDS if subject.serves(kind)]
    return subject.cache(*(layer_spec(kinds[i % len(kinds)]) for i in range(3)))


def _fill(subject: Subject, cache: kvrack.Cache, steps: int = 4) -> None:
    for step in range(steps + 1):
        for index, shape in enumerate(SHAPES):
            cache.update(*subject.states(1 if step else 9, shape, seed=10 * step + index), index)


def _expect_same_layers(subject: Subject, one: kvrack.Cache, other: kvrack.Cache) -> None:
    rows = one.batch_size
    for index, (mine, its) in enumerate(zip(one.layers, other.layers, strict=True)):
        assert isinstance(mine, AttentionLayer)
        assert isinstance(its, AttentionLayer)
        shape = SHAPES[index]
        keys, values = subject.states(1, Shape(max(rows, 1), shape.heads, shape.key_dim, shape.value_dim), seed=77)
        expect_same(mine, its, keys, values)


@pytest.mark.rule("C1")
def test_an_update_changes_its_layer_alone(subject: Subject) -> None:
    cache = _mixed(subject)
    _fill(subject, cache)
    others = [layer for layer in cache.layers[1:] if isinstance(layer, AttentionLayer)]
    with Unchanged(others[0], "an update of layer 0"), Unchanged(others[1], "an update of layer 0"):
        cache.update(*subject.states(1, seed=3), 0)


@pytest.mark.rule("C2")
def test_lengths_are_of_the_layer_asked_for(subject: Subject) -> None:
    cache = _mixed(subject)
    _fill(subject, cache)
    cache.update(*subject.states(1, seed=3), 0)
    for index, layer in enumerate(cache.layers):
        assert isinstance(layer, AttentionLayer)
        expect_equal(cache.get_seq_length(index), layer.get_seq_length(), f"get_seq_length({index})")
        expect_equal(cache.get_mask_sizes(1, index), layer.get_mask_sizes(1), f"get_mask_sizes(1, {index})")
    limits = [layer.get_max_length() for layer in cache.layers if isinstance(layer, AttentionLayer)]
    wanted = min((limit for limit in limits if limit >= 0), default=-1)
    expect_equal(cache.get_max_length(), wanted, "get_max_length(), the smallest of the layers' limits,")
    expect_equal(cache.is_sliding, [layer.is_sliding for layer in cache.layers], "is_sliding")


@pytest.mark.rule("C3")
@pytest.mark.parametrize("removed", [1, 4])
def test_crop_acts_on_every_layer_or_none(subject: Subject, removed: int) -> None:
    cache = _mixed(subject)
    _fill(subject, cache)
    layers = [layer for layer in cache.layers if isinstance(layer, AttentionLayer)]
    before = [int(layer.get_seq_length()) for layer in layers]
    storages = [{name: tensor.clone() for name, tensor in layer.storage().items()} for layer in layers]
    try:
        cache.crop(-removed)
    except kvrack.UnsupportedOperation:
        expect_equal([int(layer.get_seq_length()) for layer in layers], before, "lengths after a refused crop")
        for layer, storage in zip(layers, storages, strict=True):
            for name, tensor in storage.items():
                expect(
                    same_bits(layer.storage()[name], tensor), "layers unchanged by a refused crop", f"{name} changed"
                )
        return
    wanted = [length - removed for length in before]
    expect_equal([int(layer.get_seq_length()) for layer in layers], wanted, f"lengths after crop({-removed})")


@pytest.mark.rule("C4")
@pytest.mark.parametrize("operation", ["reset", "reorder_cache", "batch_repeat_interleave", "batch_select_indices"])
def test_operations_act_on_every_layer(subject: Subject, operation: str) -> None:
    arguments: dict[str, tuple[object, ...]] = {
        "reset": (),
        "reorder_cache": (torch.tensor([2, 0, 1], device=subject.device),),
        "batch_repeat_interleave": (2,),
        "batch_select_indices": (torch.tensor([2, 0], device=subject.device),),
    }
    cache, other = _mixed(subject), _mixed(subject)
    _fill(subject, cache)
    _fill(subject, other)
    getattr(cache, operation)(*arguments[operation])
    for layer in other.layers:
        getattr(layer, operation)(*arguments[operation])
    expect_equal(cache.batch_size, other.batch_size, f"batch_size after {operation}")
    _expect_same_layers(subject, cache, other)


@pytest.mark.rule("C5")
def test_memory_adds_up(subject: Subject) -> None:
    cache = _mixed(subject)
    expect_equal(cache.nbytes, 0, "nbytes of a new cache")
    _fill(subject, cache)
    rows = cache.memory()
    expect_equal(sum(row.nbytes for row in rows), cache.nbytes, "nbytes, the sum of memory(),")
    expect_equal(sorted({row.layer for row in rows}), [0, 1, 2], "layers in memory()")
    # What is held elsewhere is brought as a copy, which is no memory of the layer's.
    away = [layer for layer in cache.layers if layer.elsewhere()]
    for layer in away:
        held = sum(tensor.numel() * tensor.element_size() for tensor in layer.storage().values())
        expect(layer.nbytes >= held, f"nbytes of {held} or more, what storage() brings,", layer.nbytes)
    memories = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        if layer not in away
        for tensor in layer.storage().values()
    }
    # Memory to decode into is the cache's, and in no layer's storage().
    other = sum(row.nbytes for row in rows if row.role == "scratch") + sum(layer.nbytes for layer in away)
    expect_equal(cache.nbytes - other, sum(memories.values()), "nbytes, memory that two share counted once,")


@pytest.mark.rule("C6")
def test_open_layers_are_created_when_updated(subject: Subject) -> None:
    cache = kvrack.create_cache(subject.name, kvrack.ModelSpec(further=LayerSpec()), 128, **subject.settings)
    listed = subject.cache(*[LayerSpec()] * 3, max_length=128)
    expect_equal(len(cache), 0, "layers before any update")
    expect_equal(cache.get_seq_length(), 0, "get_seq_length() before any layer")
    _fill(subject, cache)
    _fill(subject, listed)
    expect_equal(len(cache), 3, "layers after updates of three")
    _expect_same_layers(subject, cache, listed)


@pytest.mark.rule("C7")
def test_layers_may_differ(subject: Subject) -> None:
    cache = _mixed(subject)
    for step in range(3):
        for index, shape in enumerate(SHAPES):
            keys, values = subject.states(1 if step else 9, shape, seed=step)
            returned = cache.update(keys, values, index)[0]
            form = (returned.shape[0], returned.shape[1], returned.shape[3])
            expect_equal(form, (shape.batch, shape.heads, shape.key_dim), f"layer {index}: (batch, heads, head_dim)")


@pytest.mark.rule("C7")
@pytest.mark.capability("early_init")
def test_layers_may_differ_when_initialized_early(subject: Subject) -> None:
    cache, other = _mixed(subject), _mixed(subject)
    heads, dims = [shape.heads for shape in SHAPES], [shape.key_dim for shape in SHAPES]
    cache.early_initialization(3, heads, dims, torch.float32, torch.device(subject.device))
    if not cache.is_initialized:
        broken("is_initialized after early_initialization of every layer", False)
    _fill(subject, cache)
    _fill(subject, other)
    _expect_same_layers(subject, cache, other)


@pytest.mark.rule("C8")
@pytest.mark.parametrize("tokens", [300, 2700])
def test_memory_is_predicted(subject: Subject, kind: str, tokens: int) -> None:
    shape = Shape(batch=2)
    fields = {"kv_heads": shape.heads, "key_head_dim": shape.key_dim, "value_head_dim": shape.value_dim}
    model = kvrack.ModelSpec(layers=(layer_spec(kind, **fields),) * 2)
    settings = dict(subject.settings)
    cache = kvrack.create_cache(subject.name, model, tokens, **settings)
    if 0 <= cache.get_max_length() < tokens:
        pytest.skip(f"{tokens} tokens are past the capacity that the settings give")
    for new in (tokens - 1, 1):
        for index in range(2):
            cache.update(*subject.states(new, shape, seed=index), index)
    predicted = kvrack.predict_memory(subject.name, model, tokens, shape.batch, shape.dtype, **settings)
    expect(
        abs(predicted.nbytes - cache.nbytes) <= 0.03 * cache.nbytes,
        f"{cache.nbytes} bytes predicted, within 3%, as the cache holds",
        predicted.nbytes,
    )


@pytest.mark.rule("C9")
def test_listening_changes_nothing(subject: Subject) -> None:
    told: list[kvrack.CacheEvent] = []

    def fail(event: kvrack.CacheEvent) -> None:
        raise RuntimeError("this listener fails on purpose")

    alone = _mixed(subject)
    _fill(subject, alone)
    with kvrack.listen(told.append), kvrack.listen(fail):
        watched = _mixed(subject)
        _fill(subject, watched)
        _expect_same_layers(subject, watched.fork(), alone.fork())
    _expect_same_layers(subject, watched, alone)
    expect_equal(told[0].kind if told else None, "created", "the first event, of a cache that was built,")
    for event in told:
        expect_equal(event.backend, watched.name, f"backend of {event}")
        expect(event.layer_index is None or event.layer_index in range(3), f"an index of a layer in {event}", event)
        expect(
            event.nbytes >= 0 and (event.tokens is None or event.tokens >= 0), f"no negative number in {event}", event
        )


@pytest.mark.rule("C10")
def test_layers_live_where_their_keys_arrive(subject: Subject, kind: str) -> None:
    devices = [torch.device(subject.device), another_device(subject.device)]
    cache, alone = subject.cache(*[layer_spec(kind)] * 2), subject.layer(kind)
    given = [subject.states(new, Shape(batch=2), seed=new) for new in (9, 1, 1)]
    with OneDeviceAtATime():
        for keys, values in given:
            alone.update(keys, values)
            for index, device in enumerate(devices):
                try:
                    returned = cache.update(keys.to(device), values.to(device), index)
                except kvrack.KvrackError:
                    raise
                except (RuntimeError, NotImplementedError) as error:
                    if device.type != "meta":
                        raise
                    pytest.skip(f"without an accelerator there is no second device, and meta doesn't do: {error}")
                for what, states in zip(("keys", "values"), returned, strict=True):
                    expect_equal(states.device.type, device.type, f"device of returned {what} of layer {index}")
        indices = torch.tensor([1, 0, 1])
        acts: tuple[Callable[[AttentionLayer | kvrack.Cache], None], ...] = (
            lambda held: held.reorder_cache(indices[:2]),
            lambda held: held.batch_repeat_interleave(2),
            lambda held: held.batch_select_indices(indices),
        )
        for act in acts:
            act(alone)
            act(cache)
            for index, (layer, device) in enumerate(zip(cache.layers, devices, strict=True)):
                held = {name: (tensor.shape, tensor.device.type) for name, tensor in layer.storage().items()}
                wanted = {name: (tensor.shape, device.type) for name, tensor in alone.storage().items()}
                expect_equal(held, wanted, f"storage() of layer {index}, shapes and devices,")
    first = cache.layers[0]
    assert isinstance(first, AttentionLayer)
    expect_same(first, alone, *subject.states(1, Shape(batch=3), seed=77))
    if not any(layer.elsewhere() for layer in cache.layers):
        for index, device in enumerate(devices):
            places = {
                torch.device(row.device).type
                for row in cache.memory()
                if row.layer == index and "scratch" not in row.role
            }
            expect_equal(places, {device.type}, f"devices of layer {index} in memory()")
