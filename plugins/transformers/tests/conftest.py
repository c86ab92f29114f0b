import pytest
import torch
import transformers

import kvrack_transformers as kt


@pytest.fixture(scope="session")
def llama() -> transformers.PreTrainedModel:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def enabled():
    """kvrack's names in transformers for the length of a test."""
    kt.enable()
    yield
    kt.disable()
