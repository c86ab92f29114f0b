"""Every kind of model answers with a cache on disk, bit for bit, what it answers with the same cache on the device."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

pytest.importorskip("kvrack_offload", reason="the disk is kvrack-offload's: pip install kvrack-offload")
STEPS = 8


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def answers(model: PreTrainedModel, ids: torch.Tensor, cache: kt.TransformersCache | None, **settings):
    """Return the tokens and the logits of each step."""
    given = {} if cache is None else {CACHE_ARGUMENT: cache}
    settings = {"do_sample": False, "max_new_tokens": STEPS, "attention_mask": torch.ones_like(ids), **settings}
    answer = model.generate(ids, return_dict_in_generate=True, output_logits=True, **given, **settings)
    return answer.sequences, torch.stack(answer.logits)


@pytest.fixture(params=["dynamic", "static", "fp8"])
def pair(request: pytest.FixtureRequest):
    """Return a function from a model to a cache on disk and the same one on the device."""

    def build(model: PreTrainedModel) -> tuple[kt.TransformersCache, kt.TransformersCache]:
        name = request.param
        return (
            kt.create_cache(model, "offload", max_length=64, inner=name, tier="disk"),
            kt.create_cache(model, name, max_length=64),
        )

    return build


def test_chat_turns_are_bit_identical(model: PreTrainedModel, pair) -> None:
    on_disk, on_device = pair(model)
    ids = prompt(9, batch=2)
    for turn in range(2):
        tokens, logits = answers(model, ids, on_disk)
        expected_tokens, expected_logits = answers(model, ids, on_device)
        assert torch.equal(logits, expected_logits)
        assert torch.equal(tokens, expected_tokens)
        ids = torch.cat([tokens, prompt(4, batch=2, seed=turn + 2)], dim=1)
    assert {row.device for row in on_disk.memory()} >= {"disk"}


def test_beams_are_bit_identical(model: PreTrainedModel, pair) -> None:
    on_disk, on_device = pair(model)
    settings = {"num_beams": 3, "num_return_sequences": 3}
    tokens, logits = answers(model, prompt(7), on_disk, **settings)
    expected_tokens, expected_logits = answers(model, prompt(7), on_device, **settings)
    assert torch.equal(logits, expected_logits)
    assert torch.equal(tokens, expected_tokens)
    assert len({tuple(row.tolist()) for row in tokens}) == 3


def test_its_name_in_generate(models) -> None:
    model, ids = models("gemma2"), prompt(9)
    expected = model.generate(ids, do_sample=False, max_new_tokens=STEPS, use_cache=False)
    for name in ("offload", "offloaded", "offloaded_static"):
        got = model.generate(
            ids,
            do_sample=False,
            max_new_tokens=STEPS,
            cache_implementation=name,
            cache_config={"tier": "disk", "resident_layers": 1},
        )
        assert torch.equal(got, expected), name
