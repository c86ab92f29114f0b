"""Every kind of model gives with a kvrack cache what it gives without any cache."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

WINDOW = 6
STEPS = 8
PROMPTS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1)


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 64, (batch, length), generator=generator)


def generate(model: PreTrainedModel, ids: torch.Tensor, **settings):
    settings = {"do_sample": False, "max_new_tokens": STEPS, **settings}
    return model.generate(ids, **{"attention_mask": torch.ones_like(ids), **settings})


@pytest.mark.parametrize("length", PROMPTS)
def test_logits_equal_those_without_a_cache(model: PreTrainedModel, backend: str, length: int) -> None:
    ids = prompt(length + STEPS, batch=2)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = kt.create_cache(model, backend, max_length=64)
        seen = [model(ids[:, :length], use_cache=True, **{CACHE_ARGUMENT: cache}).logits]
        assert cache.get_seq_length() == length
        for step in range(length, length + STEPS):
            seen.append(model(ids[:, step : step + 1], use_cache=True, **{CACHE_ARGUMENT: cache}).logits)
    got = torch.cat(seen, dim=1)
    assert expected.std() > 0.5, "logits too flat to tell a right cache from a wrong one"
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert type(cache.get_seq_length()) is int
    assert cache.get_seq_length() == length + STEPS


@pytest.mark.parametrize("chunks", [(5, 4), (4, 3, 2), (7, 1, 6)])
def test_a_sequence_fed_in_pieces_equals_it_at_once(
    model: PreTrainedModel, backend: str, chunks: tuple[int, ...]
) -> None:
    ids = prompt(sum(chunks))
    cache = kt.create_cache(model, backend, max_length=64)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        got = torch.cat(
            [model(piece, use_cache=True, **{CACHE_ARGUMENT: cache}).logits for piece in ids.split(chunks, dim=1)],
            dim=1,
        )
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("length", PROMPTS)
def test_greedy_tokens(model: PreTrainedModel, backend: str, length: int) -> None:
    ids = prompt(length)
    assert torch.equal(generate(model, ids, cache_implementation=backend), generate(model, ids, use_cache=False))


def test_beam_search(model: PreTrainedModel, backend: str) -> None:
    ids = prompt(9)
    expected = generate(model, ids, num_beams=3, num_return_sequences=3, use_cache=False)
    assert torch.equal(
        generate(model, ids, num_beams=3, num_return_sequences=3, cache_implementation=backend), expected
    )


def test_sampling_several_sequences(model: PreTrainedModel, backend: str) -> None:
    ids = prompt(9)
    answers = []
    for settings in ({"use_cache": False}, {"cache_implementation": backend}):
        torch.manual_seed(0)
        answers.append(generate(model, ids, do_sample=True, temperature=8.0, num_return_sequences=3, **settings))
    assert torch.equal(*answers)
    assert len({tuple(row.tolist()) for row in answers[0]}) > 1, "all samples alike: nothing was sampled"


def test_left_padded_batch_equals_each_row_alone(model: PreTrainedModel, backend: str) -> None:
    rows = [prompt(4, seed=2), prompt(9, seed=3)]
    padded = torch.zeros(2, 9, dtype=torch.long)
    mask = torch.zeros(2, 9, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, 9 - row.shape[1] :] = row
        mask[index, 9 - row.shape[1] :] = 1
    together = generate(model, padded, attention_mask=mask, cache_implementation=backend)[:, 9:]
    for index, row in enumerate(rows):
        alone = generate(model, row, cache_implementation=backend)[0, row.shape[1] :]
        assert torch.equal(together[index], alone)


def test_two_chat_turns_on_one_cache_equal_the_whole_conversation(model: PreTrainedModel, backend: str) -> None:
    first, second = prompt(9, seed=4), prompt(5, seed=5)
    cache = kt.create_cache(model, backend, max_length=64)
    answered = generate(model, first, **{CACHE_ARGUMENT: cache})
    conversation = torch.cat([answered, second], dim=1)
    got = generate(model, conversation, **{CACHE_ARGUMENT: cache})
    assert torch.equal(got, generate(model, conversation, use_cache=False))


def test_second_turn_of_a_left_padded_batch(model: PreTrainedModel, backend: str) -> None:
    ids, mask = prompt(9, batch=2, seed=6), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    cache = kt.create_cache(model, backend, max_length=64)
    answered = generate(model, ids, attention_mask=mask, **{CACHE_ARGUMENT: cache})
    conversation = torch.cat([answered, prompt(3, batch=2, seed=7)], dim=1)
    mask = torch.cat([mask, torch.ones(2, conversation.shape[1] - 9, dtype=torch.long)], dim=1)
    got = generate(model, conversation, attention_mask=mask, **{CACHE_ARGUMENT: cache})
    fresh = generate(model, conversation, attention_mask=mask, cache_implementation=backend)
    assert torch.equal(got, fresh)


@pytest.mark.parametrize("size", [2, 4])
def test_chunked_prefill(model: PreTrainedModel, backend: str, size: int) -> None:
    ids = prompt(13)
    got = generate(model, ids, cache_implementation=backend, prefill_chunk_size=size)
    assert torch.equal(got, generate(model, ids, use_cache=False))


def test_prompt_lookup_decoding(model: PreTrainedModel, backend: str) -> None:
    ids = prompt(5).repeat(1, 3)
    # Early releases need an end token here, and may answer with one token more than asked for.
    settings = {"max_new_tokens": 16, "eos_token_id": 1}
    expected = generate(model, ids, use_cache=False, **settings)
    got = generate(model, ids, cache_implementation=backend, prompt_lookup_num_tokens=3, **settings)
    assert torch.equal(got[:, : expected.shape[1]], expected)


def test_assisted_decoding(model: PreTrainedModel, backend: str, models) -> None:
    ids = prompt(9)
    got = generate(model, ids, cache_implementation=backend, assistant_model=models("llama"), max_new_tokens=16)
    assert torch.equal(got, generate(model, ids, use_cache=False, max_new_tokens=16))


def test_streaming_brings_every_token(model: PreTrainedModel, backend: str) -> None:
    class Collect(BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            pass

    ids, streamer = prompt(5), Collect()
    answer = generate(model, ids, cache_implementation=backend, streamer=streamer)
    assert streamer.tokens == answer[0].tolist()


def test_reset_then_another_prompt(model: PreTrainedModel, backend: str) -> None:
    cache = kt.create_cache(model, backend, max_length=64)
    generate(model, prompt(9, batch=2, seed=8), **{CACHE_ARGUMENT: cache})
    cache.reset()
    assert cache.get_seq_length() == 0
    ids = prompt(7, seed=9)
    assert torch.equal(generate(model, ids, **{CACHE_ARGUMENT: cache}), generate(model, ids, use_cache=False))
