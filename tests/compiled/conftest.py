"""Three tiny models (plain, sliding, mixed) and what compiled decoding is measured with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import transformers
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

import kvrack_transformers as kt

WINDOW = 6
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def plain() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE))


def sliding() -> PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**BASE, sliding_window=WINDOW))


def mixed() -> PreTrainedModel:
    config = transformers.Gemma2Config(**BASE, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8)
    return transformers.Gemma2ForCausalLM(config)


KINDS: dict[str, Callable[[], PreTrainedModel]] = {build.__name__: build for build in (plain, sliding, mixed)}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A plain, a sliding and a mixed model in turn, in evaluation mode."""
    torch.manual_seed(0)
    built = KINDS[request.param]().eval()
    built.generation_config.eos_token_id = None
    return built


@pytest.fixture
def plain_model() -> PreTrainedModel:
    """The plain model, in evaluation mode."""
    torch.manual_seed(0)
    return plain().eval()


@pytest.fixture
def graphs() -> Callable[[], tuple[int, Counter]]:
    """Return a function to the number of graphs made, and the graph breaks, since the test began."""
    torch._dynamo.reset()
    counters.clear()
    return lambda: (counters["stats"]["unique_graphs"], counters["graph_break"])


@pytest.fixture(autouse=True)
def _enabled():
    kt.enable()
    yield
    kt.disable()
