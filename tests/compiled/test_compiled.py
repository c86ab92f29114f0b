"""Decoding through torch.compile gives the eager tokens, in few graphs, without a break."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils import _pytree
from transformers import CompileConfig, PreTrainedModel

import kvrack_transformers as kt
from kvrack_transformers import TransformersCache
from kvrack_transformers.versions import CACHE_ARGUMENT

WINDOW = 6
Step = Callable[..., object]


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def decode(model: PreTrainedModel, step: Step, cache: TransformersCache, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Return the greedy tokens, the prompt fed to `model` and each further token to `step`."""
    with torch.no_grad():
        token = model(ids, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
        tokens = [token]
        for held in range(ids.shape[1], ids.shape[1] + steps):
            assert cache.get_seq_length() == held
            assert type(cache.get_seq_length()) is int
            token = step(token, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
            tokens.append(token)
    return torch.cat(tokens, dim=1)


def eager_tokens(model: PreTrainedModel, ids: torch.Tensor, steps: int) -> torch.Tensor:
    return decode(model, model, kt.create_cache(model, "dynamic"), ids, steps)


# --- inductor ---------------------------------------------------------------------------------------


def test_static_by_inductor_in_one_graph_and_again_after_reset(model: PreTrainedModel, graphs) -> None:
    compiled = torch.compile(model, fullgraph=True)
    cache = kt.create_cache(model, "static", max_cache_len=64)
    for seed in (1, 2):
        ids = prompt(2 * WINDOW, seed)
        assert torch.equal(decode(model, compiled, cache, ids, 12), eager_tokens(model, ids, 12))
        made, breaks = graphs()
        assert made == 1
        assert not breaks
        cache.reset()


def test_fp8_in_static_layout_by_inductor_in_one_graph(model: PreTrainedModel, graphs) -> None:
    compiled = torch.compile(model, fullgraph=True)
    settings = {"layout": "static", "max_cache_len": 64}
    cache = kt.create_cache(model, "fp8", **settings)
    ids = prompt(2 * WINDOW)
    eager = decode(model, model, kt.create_cache(model, "fp8", **settings), ids, 12)
    assert torch.equal(decode(model, compiled, cache, ids, 12), eager)
    assert graphs() == (1, {})


def test_dynamic_by_inductor(plain_model: PreTrainedModel, graphs) -> None:
    compiled = torch.compile(plain_model)
    cache = kt.create_cache(plain_model, "dynamic")
    ids = prompt(20)
    assert torch.equal(decode(plain_model, compiled, cache, ids, 60), eager_tokens(plain_model, ids, 60))
    made, breaks = graphs()
    assert made <= 4
    assert not breaks


# --- graphs, counted with a backend that compiles in no time ----------------------------------------


def test_static_makes_one_graph_for_each_size(plain_model: PreTrainedModel, graphs) -> None:
    compiled = torch.compile(plain_model, fullgraph=True, backend="eager")
    cache = kt.create_cache(plain_model, "static", max_cache_len=700)
    for length, sizes in ((250, 2), (508, 3)):
        ids = prompt(length)
        assert torch.equal(decode(plain_model, compiled, cache, ids, 12), eager_tokens(plain_model, ids, 12))
        assert graphs() == (sizes, {}), "views of 256, 512 and 700 slots"
        cache.reset()


def test_static_without_prefix_views_makes_one_graph_for_life(plain_model: PreTrainedModel, graphs) -> None:
    compiled = torch.compile(plain_model, fullgraph=True, backend="eager")
    cache = kt.create_cache(plain_model, "static", max_cache_len=700, attend_prefix=False)
    for length in (250, 508):
        ids = prompt(length)
        assert torch.equal(decode(plain_model, compiled, cache, ids, 12), eager_tokens(plain_model, ids, 12))
        assert graphs() == (1, {})
        cache.reset()


def test_static_makes_a_graph_before_and_one_after_the_window_is_full(model: PreTrainedModel, graphs) -> None:
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = kt.create_cache(model, "static", max_cache_len=64)
    ids = prompt(WINDOW - 3)
    assert torch.equal(decode(model, compiled, cache, ids, 20), eager_tokens(model, ids, 20))
    made, breaks = graphs()
    assert made == (2 if True in cache.is_sliding else 1)
    assert not breaks


def test_dynamic_makes_at_most_four_graphs_over_2000_tokens(model: PreTrainedModel, graphs) -> None:
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    cache = kt.create_cache(model, "dynamic")
    ids, steps = prompt(WINDOW - 3), 2000
    decode(model, compiled, cache, ids, steps)
    made, breaks = graphs()
    assert made <= 4
    assert not breaks


# --- generate ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("backend", ["static", "dynamic"])
def test_generate_with_its_own_compilation(model: PreTrainedModel, backend: str, chunk: int | None, graphs) -> None:
    ids = prompt(2 * WINDOW)
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 10, "do_sample": False}
    expected = model.generate(ids, use_cache=False, **settings)
    compilation = CompileConfig(backend="aot_eager", mode=None, fullgraph=False)
    compilation._compile_all_devices = True
    got = model.generate(
        ids, cache_implementation=backend, compile_config=compilation, prefill_chunk_size=chunk, **settings
    )
    assert torch.equal(got, expected)
    # generate compiles for caches that may return unused slots, and for no others.
    assert (graphs()[0] > 0) == (backend == "static")
    assert not graphs()[1]


@pytest.mark.parametrize("backend", ["static", "dynamic"])
def test_chunked_prefill_through_a_compiled_model(model: PreTrainedModel, backend: str, graphs) -> None:
    ids = prompt(13)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = kt.create_cache(model, backend, max_length=64)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        got = [compiled(piece, **{CACHE_ARGUMENT: cache}).logits for piece in ids.split((4, 4, 4, 1), dim=1)]
    torch.testing.assert_close(torch.cat(got, dim=1), expected, rtol=1e-3, atol=1e-3)
    assert not graphs()[1]


# --- export and pytrees -----------------------------------------------------------------------------


def test_an_exported_step_serves_every_length_of_its_size(model: PreTrainedModel) -> None:
    ids, steps = prompt(2), 3
    cache = kt.create_cache(model, "static", max_cache_len=64)
    with torch.no_grad():
        token = model(ids, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
        program = torch.export.export(model, (token,), {CACHE_ARGUMENT: cache}, strict=False).module()
        tokens = [token]
        for held in range(2, 2 + steps):
            out = program(token, **{CACHE_ARGUMENT: cache})
            cache = out[CACHE_ARGUMENT]
            assert isinstance(cache, TransformersCache)
            assert cache.get_seq_length() == held + 1
            token = out.logits[:, -1:].argmax(-1)
            tokens.append(token)
    assert torch.equal(torch.cat(tokens, dim=1), eager_tokens(model, ids, steps))


@pytest.mark.parametrize("backend", ["static", "dynamic"])
def test_pytrees_keep_kinds_windows_and_lengths(model: PreTrainedModel, backend: str) -> None:
    ids = prompt(9)
    cache = kt.create_cache(model, backend, max_length=64)
    with torch.no_grad():
        model(ids, **{CACHE_ARGUMENT: cache})
    leaves, structure = _pytree.tree_flatten(cache)
    again = _pytree.tree_unflatten([leaf.clone() for leaf in leaves], structure)
    assert isinstance(again, TransformersCache)
    assert [type(layer) for layer in again.layers] == [type(layer) for layer in cache.layers]
    assert [layer.spec for layer in again.layers] == [layer.spec for layer in cache.layers]
    assert [again.get_seq_length(i) for i in range(2)] == [9, 9]
    token = prompt(1, seed=5)
    with torch.no_grad():
        expected = model(token, **{CACHE_ARGUMENT: cache}).logits
        assert torch.equal(model(token, **{CACHE_ARGUMENT: again}).logits, expected)
