from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import kvrack_transformers as kt

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def llama() -> transformers.PreTrainedModel:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, vocab_size=64)).eval()


@pytest.fixture(scope="session")
def mistral() -> transformers.PreTrainedModel:
    """A model like it with a window of 6."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**TINY, vocab_size=64, sliding_window=6)
    return transformers.MistralForCausalLM(config).eval()


@pytest.fixture
def enabled():
    """kvrack's names in transformers for the length of a test."""
    kt.enable()
    yield
    kt.disable()


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACES = [("Ġ", "Ġ"), ("ĠĠ", "Ġ")]
"""Merges of the tiny tokenizer: two spaces, and three, are a token each."""


@pytest.fixture(scope="session")
def tiny_vocabulary() -> list[str]:
    """The tokens of the tiny tokenizer: three special ones, every byte, and two runs of spaces."""
    return ["<unk>", "<s>", "</s>", *LETTERS, "ĠĠ", "ĠĠĠ"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_vocabulary: list[str]) -> Path:
    """A folder with a tiny Llama of random weights, 96 positions, and a byte-level tokenizer without chat template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, vocab_size=len(tiny_vocabulary), max_position_embeddings=96)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tiny_vocabulary)}, SPACES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    ).save_pretrained(folder)
    return folder
