"""The models that the ranks load, in a folder."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
import transformers

sys.path.append(str(Path(__file__).parents[1] / "zoo"))
from tiny_families import BASE

TINY = {**BASE, "initializer_range": 0.3}


def _save(model: transformers.PreTrainedModel, folder: Path) -> None:
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama of grouped heads, one with as many KV heads as heads, and a Mistral with a window
    of 6, each of random weights, drawn wide so that greedy tokens tell a right cache from a wrong one."""
    folder = tmp_path_factory.mktemp("ranks")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        _save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)), folder / "llama")
        four = {**TINY, "num_key_value_heads": 4}
        _save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**four)), folder / "four")
        _save(transformers.MistralForCausalLM(transformers.MistralConfig(**TINY, sliding_window=6)), folder / "mistral")
    return folder
