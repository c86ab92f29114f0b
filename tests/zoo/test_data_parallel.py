"""A cache that torch.nn.DataParallel gathers from the devices goes on as the cache of the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn.parallel import scatter_gather
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import kvrack
import kvrack_transformers as kt
from kvrack.registry import installed
from kvrack_transformers.versions import CACHE_ARGUMENT

LENGTH, STEPS = 9, 3


class Joined:
    """What gathers tensors here: torch's own does it for accelerators alone, and so does its name for it."""

    @staticmethod
    def apply(target: object, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        # As torch's: scalars become a vector.
        return torch.stack(tensors) if tensors[0].dim() == 0 else torch.cat(tensors, dim)


@pytest.fixture
def gathers_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scatter_gather, "Gather", Joined)


def tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(1))


def filled(model: PreTrainedModel, backend: str, ids: torch.Tensor, **inputs: Any) -> Any:
    """Return what the model says of these rows, with a cache."""
    cache = kt.create_cache(model, backend, max_length=64)
    return model(ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **inputs)


@pytest.mark.usefixtures("gathers_on_cpu")
def test_it_goes_on_as_the_whole_batch(model: PreTrainedModel, backend: str) -> None:
    ids = tokens(4, LENGTH + STEPS)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, LENGTH:]
        replicas = [filled(model, backend, rows[:, :LENGTH]) for rows in ids.split(2)]
        if type(model) is transformers.MistralForCausalLM:
            with pytest.raises(kvrack.UnsupportedOperation, match="layers all have full windows"):
                scatter_gather.gather(replicas, "cpu")
            return
        gathered = scatter_gather.gather(replicas, "cpu")[CACHE_ARGUMENT]
        assert isinstance(gathered, kt.TransformersCache)
        assert gathered.get_seq_length() == LENGTH
        assert gathered.batch_size == 4
        seen = [
            model(ids[:, at : at + 1], use_cache=True, **{CACHE_ARGUMENT: gathered}).logits
            for at in range(LENGTH, LENGTH + STEPS)
        ]
    torch.testing.assert_close(torch.cat(seen, dim=1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif("encoder-decoder" not in installed(), reason="kvrack-encoder-decoder is not installed")
@pytest.mark.usefixtures("gathers_on_cpu")
@pytest.mark.parametrize("name", ["t5", "t5gemma"])
def test_both_sides_of_an_encoder_decoder_model_go_on(models: Callable[[str], PreTrainedModel], name: str) -> None:
    model, source, ids = models(name), tokens(4, 7), tokens(4, LENGTH + STEPS)
    with torch.no_grad():
        expected = model(input_ids=source, decoder_input_ids=ids, use_cache=False).logits[:, LENGTH:]
        replicas = [
            filled(model, "dynamic", rows, decoder_input_ids=decoded[:, :LENGTH])
            for rows, decoded in zip(source.split(2), ids.split(2), strict=True)
        ]
        output = scatter_gather.gather(replicas, "cpu")
        gathered = output[CACHE_ARGUMENT]
        assert isinstance(gathered, kt.TransformersEncoderDecoderCache)
        encoded = BaseModelOutput(output.encoder_last_hidden_state)
        seen = [
            model(
                encoder_outputs=encoded,
                decoder_input_ids=ids[:, at : at + 1],
                use_cache=True,
                **{CACHE_ARGUMENT: gathered},
            ).logits
            for at in range(LENGTH, LENGTH + STEPS)
        ]
    torch.testing.assert_close(torch.cat(seen, dim=1), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.skipif("mamba" not in installed(), reason="kvrack-mamba is not installed")
@pytest.mark.usefixtures("gathers_on_cpu")
def test_states_are_not_gathered_and_nothing_goes_on_without_them(models: Callable[[str], PreTrainedModel]) -> None:
    model, ids = models("qwen3_next"), tokens(4, LENGTH)
    with torch.no_grad():
        replicas = [filled(model, "dynamic", rows) for rows in ids.split(2)]
        gathered = scatter_gather.gather(replicas, "cpu")[CACHE_ARGUMENT]
        with pytest.raises(kvrack.UnsupportedOperation, match="a state of layer 0"):
            model(ids[:, :1], use_cache=True, **{CACHE_ARGUMENT: gathered})
