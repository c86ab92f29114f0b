"""Tiny models with random weights, one of each kind of memory, and the backends to run them through.

Weights are drawn wide (standard deviation 0.3), so that one token too many or too few in a window
changes the logits by far more than rounding does.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

import kvrack
import kvrack_transformers as kt

sys.path.insert(0, str(Path(__file__).parent))
from tiny_encoder_decoders import ENCODER_DECODERS
from tiny_states import ATTENTION as BASE
from tiny_states import STATES, VOCAB

WINDOW = 6


def llama() -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE))


def mistral() -> PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**BASE, sliding_window=WINDOW))


def gemma2() -> PreTrainedModel:
    config = transformers.Gemma2Config(**BASE, head_dim=16, sliding_window=WINDOW, query_pre_attn_scalar=16)
    return transformers.Gemma2ForCausalLM(config)


def gemma3n() -> PreTrainedModel:
    config = transformers.Gemma3nTextConfig(
        **{**BASE, "num_hidden_layers": 6},
        head_dim=16,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=3,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        activation_sparsity_pattern=[0.0] * 6,
    )
    return transformers.Gemma3nForCausalLM(config)


def llama4() -> PreTrainedModel:
    config = transformers.Llama4TextConfig(
        **{**BASE, "num_hidden_layers": 4},
        head_dim=16,
        intermediate_size_mlp=64,
        attention_chunk_size=WINDOW,
        num_local_experts=2,
        moe_layers=[],
    )
    return transformers.Llama4ForCausalLM(config)


def qwen2() -> PreTrainedModel:
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**BASE))
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[3] = 30.0
    return model


def gpt2() -> PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def deepseek_v3() -> PreTrainedModel:
    config = transformers.DeepseekV3Config(
        **{**BASE, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    return transformers.DeepseekV3ForCausalLM(config)


ZOO: dict[str, Callable[[], PreTrainedModel]] = {
    build.__name__: build for build in (llama, mistral, gemma2, gemma3n, llama4, qwen2, gpt2, deepseek_v3)
}


def build_model(name: str, seed: int = 0) -> PreTrainedModel:
    """Return the zoo's model of this name in evaluation mode, its weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = {**ZOO, **STATES, **ENCODER_DECODERS}[name]().eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter_name, parameter in model.named_parameters():
        # How fast a state decays keeps its own values: drawn wide, it would blow up or forget at once.
        if parameter.dim() > 1 and "A_log" not in parameter_name:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


@pytest.fixture(scope="session")
def models() -> Callable[[str], PreTrainedModel]:
    """Return a function from a zoo name to its model, built once a session."""
    built: dict[str, PreTrainedModel] = {}

    def get(name: str) -> PreTrainedModel:
        if name not in built:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                built[name] = build_model(name)
        return built[name]

    return get


@pytest.fixture(params=sorted(ZOO))
def model(request: pytest.FixtureRequest, models: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Each model of the zoo in turn."""
    return models(request.param)


def exact_backends() -> list[str]:
    """Return the installed backends that load and promise exactness with their default config.

    Not those that leave attention to another, nor those that hold another's layers elsewhere: on the
    CPU they are that backend's own, and from a disk test_offload.py has them.
    """
    spec = kvrack.ModelSpec.uniform(1)
    names = []
    for name, info in kvrack.backends().items():
        if (
            name not in ("mamba", "encoder-decoder")
            and info.error is None
            and not hasattr(kvrack.resolve(name).config, "tier")
            and kvrack.create_cache(name, spec, max_length=64).capabilities.lossless
        ):
            names.append(name)
    return names


def lossy_backends() -> list[str]:
    """Return the other installed backends that load, without those that leave attention to another."""
    exact = exact_backends()
    return [
        name
        for name, info in kvrack.backends().items()
        if info.error is None and name not in (*exact, "mamba", "encoder-decoder")
    ]


@pytest.fixture(params=exact_backends())
def backend(request: pytest.FixtureRequest) -> str:
    """The name of each exact backend in turn."""
    return request.param


@pytest.fixture(autouse=True)
def _enabled():
    kt.enable()
    yield
    kt.disable()


@pytest.fixture(autouse=True)
def _single_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
