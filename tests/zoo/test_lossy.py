"""Codecs through every kind of model and every way to generate.

A lossy cache can't be asked for equal tokens. It is asked for tokens that a model without a cache
would have chosen too, but for a small difference in logits; and for exactly the tokens that come
of reordering by hand, where only the order of operations differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import kvrack
import kvrack_transformers as kt
from kvrack.codec import Codec, EncodedBuffer
from kvrack_transformers import TransformersCache
from kvrack_transformers.versions import CACHE_ARGUMENT

STEPS = 12
KINDS = ("deepseek_v3", "gemma2", "gemma3n", "llama4", "mistral")
"""Keys and values of unequal head_dim; mixed windows; shared layers; chunks; sliding windows."""


@dataclass(frozen=True)
class Lossy:
    """A codec so set that it encodes within a dozen tokens, and how far its logits may be off."""

    name: str
    margin: float
    config: dict[str, Any] = field(default_factory=dict)

    def cache(self, model: PreTrainedModel) -> TransformersCache:
        return kt.create_cache(model, self.name, max_length=64, **self.config)

    def __str__(self) -> str:
        return "-".join([self.name, *map(str, self.config.values())])


SOON = {"q_group_size": 4, "residual_length": 2}
LOSSY = [
    Lossy("fp8", 1.0),
    Lossy("fp8", 1.0, {"layout": "static"}),
    Lossy("hqq", 0.2, {"nbits": 8, **SOON}),
    Lossy("hqq", 0.2, {"nbits": 8, "axis_key": 1, "layout": "static", **SOON}),
    Lossy("quanto", 2.0, {"nbits": 4, "sink_tokens": 3, **SOON}),
]
INSTALLED = [each for each in LOSSY if each.name in kvrack.backends()]


@pytest.fixture(autouse=True)
def _encode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let codecs not wait until dozens of tokens came."""
    make = EncodedBuffer.__init__

    def patched(self: EncodedBuffer, codec: Codec, *args: Any) -> None:
        codec.flush_tokens = 1
        make(self, codec, *args)

    monkeypatch.setattr(EncodedBuffer, "__init__", patched)


@pytest.fixture(params=INSTALLED, ids=str)
def lossy(request: pytest.FixtureRequest) -> Lossy:
    return request.param


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest, models: Any) -> PreTrainedModel:
    return models(request.param)


def only(*kinds: str) -> pytest.MarkDecorator:
    """Run a test on some of the models alone: those whose memory it may trip over."""
    return pytest.mark.parametrize("model", kinds, indirect=True)


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": STEPS, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, **settings)


@torch.no_grad()
def shortfall(model: PreTrainedModel, answer: torch.Tensor, prompt_length: int, mask: torch.Tensor | None = None):
    """Return how far below the best logit, without a cache, the chosen token is, at worst."""
    mask = torch.ones_like(answer) if mask is None else torch.nn.functional.pad(
        mask, (0, answer.shape[1] - mask.shape[1]), value=1
    )  # fmt: skip
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(answer, attention_mask=mask, position_ids=positions, use_cache=False).logits
    before = logits[:, prompt_length - 1 : -1]
    chosen = before.gather(2, answer[:, prompt_length:, None]).squeeze(2)
    return float((before.amax(-1) - chosen).max())


def test_greedy_tokens_are_near_the_best(model: PreTrainedModel, lossy: Lossy) -> None:
    answer = generate(model, prompt(13), **{CACHE_ARGUMENT: lossy.cache(model)})
    assert shortfall(model, answer, 13) <= lossy.margin


@only("gemma2", "gemma3n", "llama4")
def test_chunked_prefill_and_a_second_turn(model: PreTrainedModel, lossy: Lossy) -> None:
    cache = lossy.cache(model)
    first = generate(model, prompt(9), prefill_chunk_size=4, **{CACHE_ARGUMENT: cache})
    conversation = torch.cat([first, prompt(5, seed=2)], dim=1)
    answer = generate(model, conversation, **{CACHE_ARGUMENT: cache})
    assert shortfall(model, first, 9) <= lossy.margin
    assert shortfall(model, answer, conversation.shape[1]) <= lossy.margin


@only("deepseek_v3", "mistral")
def test_left_padded_batch(model: PreTrainedModel, lossy: Lossy) -> None:
    ids, mask = prompt(9, batch=2, seed=3), torch.ones(2, 9, dtype=torch.long)
    ids[0, :5], mask[0, :5] = 0, 0
    answer = generate(model, ids, attention_mask=mask, **{CACHE_ARGUMENT: lossy.cache(model)})
    assert shortfall(model, answer, 9, mask) <= lossy.margin


def test_assisted_decoding(model: PreTrainedModel, lossy: Lossy, models: Any) -> None:
    config = {"cache_implementation": lossy.name, "cache_config": lossy.config}
    answer = generate(model, prompt(9), assistant_model=models("llama"), **config)
    assert shortfall(model, answer, 9) <= lossy.margin


class ByHand(TransformersCache):
    """A cache that is made anew from reordered states, all that was given so far, whenever its rows change."""

    def __init__(self, rack: kvrack.Cache) -> None:
        super().__init__(rack)
        self.given: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *rest: Any, **more: Any):
        self.given.append((key_states.clone(), value_states.clone(), layer_idx))
        return super().update(key_states, value_states, layer_idx)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.given = [(keys[beam_idx], values[beam_idx], layer) for keys, values, layer in self.given]
        self.rack = self.rack.twin()
        for keys, values, layer in self.given:
            self.rack.update(keys, values, layer)


def test_beams_equal_reordering_by_hand(model: PreTrainedModel, lossy: Lossy) -> None:
    settings = {"num_beams": 3, "num_return_sequences": 3}
    got = generate(model, prompt(9), **settings, **{CACHE_ARGUMENT: lossy.cache(model)})
    expected = generate(model, prompt(9), **settings, **{CACHE_ARGUMENT: ByHand(lossy.cache(model).rack)})
    assert torch.equal(got, expected)
    assert len({tuple(row.tolist()) for row in got}) == 3


@only("gemma2")
def test_several_sampled_sequences(model: PreTrainedModel, lossy: Lossy) -> None:
    torch.manual_seed(0)
    config = {"cache_implementation": lossy.name, "cache_config": lossy.config}
    answer = generate(model, prompt(9), do_sample=True, top_k=1, num_return_sequences=3, **config)
    assert shortfall(model, answer, 9) <= lossy.margin
    assert answer.shape == (3, 9 + STEPS)
