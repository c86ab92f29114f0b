"""Faults that people met in static caches, through models."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT


def prompt(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(1))


def generate(model: PreTrainedModel, ids: torch.Tensor, **settings) -> torch.Tensor:
    return model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, **settings)


def test_crop_of_more_than_is_held_empties(model: PreTrainedModel) -> None:
    cache = kt.create_cache(model, "static", max_cache_len=64)
    with torch.no_grad():
        model(prompt(3), **{CACHE_ARGUMENT: cache})
        cache.crop(-5)
        assert cache.get_seq_length() == 0
        expected = model(prompt(4), use_cache=False).logits
        torch.testing.assert_close(model(prompt(4), **{CACHE_ARGUMENT: cache}).logits, expected)


def test_unused_slots_are_never_attended(model: PreTrainedModel) -> None:
    ids = prompt(5)
    answers = []
    for stale in (0.0, 1e4):
        cache = kt.create_cache(model, "static", max_cache_len=64)
        with torch.no_grad():
            model(ids, **{CACHE_ARGUMENT: cache})
            for layer in cache.layers:
                for buffer in (layer._keys, layer._values):
                    buffer.data[:, :, 5:] = stale
            answers.append(model(prompt(1), **{CACHE_ARGUMENT: cache}).logits)
    assert torch.equal(*answers)


def test_past_capacity_is_an_error_with_the_numbers(plain_model: PreTrainedModel) -> None:
    with pytest.raises(kvrack.CapacityExceeded, match=r"capacity is 6 tokens, 0 are held and 9 more were asked for"):
        generate(plain_model, prompt(9), cache_implementation="static", cache_config={"max_cache_len": 6})
    cache = kt.create_cache(plain_model, "static", max_cache_len=6)
    with torch.no_grad():
        plain_model(prompt(6), **{CACHE_ARGUMENT: cache})
        with pytest.raises(kvrack.CapacityExceeded, match=r"capacity is 6 tokens, 6 are held and 1 more"):
            plain_model(prompt(1), **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == 6


def test_a_smaller_batch_after_reset(model: PreTrainedModel) -> None:
    cache = kt.create_cache(model, "static", max_cache_len=64)
    generate(model, prompt(9, batch=2), **{CACHE_ARGUMENT: cache})
    cache.reset()
    ids = prompt(7)
    assert torch.equal(generate(model, ids, **{CACHE_ARGUMENT: cache}), generate(model, ids, use_cache=False))


def test_max_cache_len_is_honoured_and_other_keys_are_refused(plain_model: PreTrainedModel) -> None:
    out = generate(
        plain_model,
        prompt(5),
        cache_implementation="static",
        cache_config={"max_cache_len": 64},
        return_dict_in_generate=True,
    )
    assert out[CACHE_ARGUMENT].get_max_length() == 64
    with pytest.raises(kvrack.InvalidConfig, match=r"banana.*attend_prefix, max_cache_len"):
        generate(plain_model, prompt(5), cache_implementation="static", cache_config={"banana": 1})
