"""A cache's life through models and every installed backend: branched, kept and reused, it goes on all the same."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

KINDS = ["llama", "gemma2"]
"""One with full layers, one that has windows beside them."""

SETTINGS = {
    "hqq": {"q_group_size": 16, "residual_length": 4},
    "quanto": {"q_group_size": 16, "residual_length": 4},
    "offload": {"tier": "disk"},
}
CAPACITY = 96


def loadable() -> list[str]:
    """Return the installed backends that attend by themselves and load."""
    found = kvrack.backends().items()
    return [name for name, info in found if info.error is None and name not in ("mamba", "encoder-decoder")]


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (1, length), generator=torch.Generator().manual_seed(seed))


def new_cache(model: PreTrainedModel, name: str) -> kt.TransformersCache:
    cache = kt.create_cache(model, name, max_length=CAPACITY, **SETTINGS.get(name, {}))
    assert isinstance(cache, kt.TransformersCache)
    return cache


def decode(model: PreTrainedModel, cache: kt.TransformersCache, token: int, steps: int = 6) -> list[torch.Tensor]:
    """Return the logits of greedy steps from `token` on."""
    logits = []
    with torch.no_grad():
        for _ in range(steps):
            logits.append(model(torch.tensor([[token]]), **{CACHE_ARGUMENT: cache}).logits[0, -1])
            token = int(logits[-1].argmax())
    return logits


def filled(model: PreTrainedModel, name: str) -> kt.TransformersCache:
    cache = new_cache(model, name)
    with torch.no_grad():
        model(prompt(41), **{CACHE_ARGUMENT: cache})
    decode(model, cache, 5)
    return cache


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", loadable())
def test_branches_and_files_go_on_bit_for_bit(
    models: Callable[[str], PreTrainedModel], name: str, kind: str, tmp_path: Path
) -> None:
    model = models(kind)
    cache = filled(model, name)
    cache.save(tmp_path / "cache.kv", fingerprint=kt.fingerprint(model))
    wanted = {token: decode(model, filled(model, name), token) for token in (7, 8, 9)}
    branches = {7: cache.fork(), 8: copy.deepcopy(cache), 9: cache}
    for token, branch in branches.items():
        assert all(map(torch.equal, decode(model, branch, token), wanted[token])), token
    loaded = kvrack.load(tmp_path / "cache.kv", fingerprint=kt.fingerprint(model))
    assert all(map(torch.equal, decode(model, kt.wrap(loaded), 7), wanted[7]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", loadable())
def test_prompts_from_a_store_are_answered_as_without(
    models: Callable[[str], PreTrainedModel], name: str, kind: str, tmp_path: Path
) -> None:
    model = models(kind)
    config = {**SETTINGS.get(name, {}), **({"max_cache_len": CAPACITY} if "static" in name else {})}
    store = kvrack.PrefixStore(1 << 30, tmp_path, fingerprint=kt.fingerprint(model))
    settings = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": name, "cache_config": config}
    lossless = new_cache(model, name).rack.capabilities.lossless
    for turn in range(3):
        ids = torch.cat([prompt(40), prompt(4, seed=10 + turn)], dim=1)
        got = kt.generate(model, ids, prefix_store=store, **settings)
        assert got.shape == (1, 50)
        if lossless:
            assert torch.equal(got, model.generate(ids, use_cache=False, max_new_tokens=6, do_sample=False))
    # What has windows learns at the second prompt where they part.
    assert store.stats.hits == (2 if kind == "llama" else 1)
    again = kvrack.PrefixStore(1 << 30, tmp_path, fingerprint=kt.fingerprint(model))
    assert len(again) == len(store)
    assert torch.equal(kt.generate(model, ids, prefix_store=again, **settings), got)
    assert again.stats.hits == 1


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "bamba"])
def test_models_with_states_are_kept_and_branched_too(
    models: Callable[[str], PreTrainedModel], kind: str, tmp_path: Path
) -> None:
    model = models(kind)
    store = kvrack.PrefixStore(1 << 30)
    for turn, again in itertools.product(range(2), range(2)):
        ids = torch.cat([prompt(12), prompt(3, seed=10 + turn)], dim=1)
        got = kt.generate(model, ids, prefix_store=store, max_new_tokens=6, do_sample=False)
        assert torch.equal(got, model.generate(ids, use_cache=False, max_new_tokens=6, do_sample=False)), (turn, again)
    assert store.stats.hits == 2
    cache = filled(model, "dynamic")
    cache.save(tmp_path / "cache.kv")
    wanted = decode(model, filled(model, "dynamic"), 7)
    for branch in (cache.fork(), kt.wrap(kvrack.load(tmp_path / "cache.kv")), cache):
        assert all(map(torch.equal, decode(model, branch, 7), wanted))
