"""The attention implementation "kvrack" answers as "sdpa" does, for groups of queries, under masks and in bfloat16."""

import copy

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvrack_transformers as kt
import kvrack_transformers.attention
from kvrack_transformers.attention import grouped_attention_forward


@pytest.fixture
def regrouped(llama: transformers.PreTrainedModel, enabled: None) -> transformers.PreTrainedModel:
    """The tiny Llama (two queries a key-value head), attending by "kvrack"."""
    model = copy.deepcopy(llama)
    model.set_attn_implementation("kvrack")
    return model


@pytest.mark.parametrize("cache", ["dynamic", None])
def test_generate_answers_as_sdpa_under_left_padding(
    llama: transformers.PreTrainedModel, regrouped: transformers.PreTrainedModel, cache: str | None
) -> None:
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
    mask = (ids != 0).long()
    arguments = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache, "attention_mask": mask}
    logits = {"output_logits": True, "return_dict_in_generate": True}
    expected = llama.generate(ids, **arguments, **logits)
    answered = regrouped.generate(ids, **arguments, **logits)
    assert torch.equal(answered.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(answered.logits), torch.stack(expected.logits))


def test_a_model_that_compiles_its_step_answers_as_sdpa(
    llama: transformers.PreTrainedModel, regrouped: transformers.PreTrainedModel
) -> None:
    token = torch.tensor([[5]])
    expected = llama(token, past_key_values=kt.create_cache(llama, "dynamic")).logits
    compiled = torch.compile(regrouped, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(token, past_key_values=kt.create_cache(llama, "dynamic")).logits, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask_heads", [None, 1, 6])
def test_one_token_attends_as_by_sdpa(dtype: torch.dtype, mask_heads: int | None) -> None:
    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    query = torch.randn(2, 6, 1, 8).to(dtype)
    key, value = torch.randn(2, 2, 9, 8).to(dtype), torch.randn(2, 2, 9, 4).to(dtype)
    mask = None if mask_heads is None else torch.rand(2, mask_heads, 1, 9) > 0.4
    answered, weights = grouped_attention_forward(module, query, key, value, mask, scaling=0.3)
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3, is_causal=False)
    assert answered.shape == expected.shape == (2, 1, 6, 4)
    assert weights is None
    torch.testing.assert_close(answered, expected)


def test_what_it_does_not_know_sdpa_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def answer(*_: object, softcap: float, **__: object) -> tuple[torch.Tensor, None]:
        asked.append(softcap)
        return query, None

    monkeypatch.setattr(kvrack_transformers.attention, "sdpa_attention_forward", answer)
    query = torch.randn(1, 2, 1, 8)
    grouped_attention_forward(torch.nn.Module(), query, query[:, :1], query[:, :1], None, softcap=30.0)
    assert asked == [30.0]


def test_disable_takes_the_name_away(llama: transformers.PreTrainedModel) -> None:
    kt.enable()
    kt.disable()
    with pytest.raises((KeyError, ValueError), match="kvrack"):
        copy.deepcopy(llama).set_attn_implementation("kvrack")
