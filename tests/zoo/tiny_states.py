"""Tiny models that keep states: alone (Mamba), between attention layers (Qwen3-Next, LFM2, Bamba), in the same layer
as attention (Falcon-H1)."""

from __future__ import annotations

import transformers
from tiny_families import BASE
from transformers import PreTrainedModel

VOCAB = 64
TOKENS = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
ATTENTION = BASE
MAMBA2 = {"mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_chunk_size": 4}


def mamba() -> PreTrainedModel:
    config = transformers.MambaConfig(**TOKENS, hidden_size=32, state_size=8, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config)


def mamba2() -> PreTrainedModel:
    config = transformers.Mamba2Config(
        **TOKENS, hidden_size=32, state_size=8, num_hidden_layers=2, num_heads=4, head_dim=16, n_groups=2, chunk_size=4
    )
    return transformers.Mamba2ForCausalLM(config)


def qwen3_next() -> PreTrainedModel:
    config = transformers.Qwen3NextConfig(
        **ATTENTION,
        head_dim=16,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_experts=0,
        mlp_only_layers=[0, 1],
        layer_types=["linear_attention", "full_attention"],
    )
    return transformers.Qwen3NextForCausalLM(config)


def lfm2() -> PreTrainedModel:
    return transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**ATTENTION, layer_types=["conv", "full_attention"]))


def bamba() -> PreTrainedModel:
    config = transformers.BambaConfig(**ATTENTION, **MAMBA2, attn_layer_indices=[1], mamba_n_heads=8)
    return transformers.BambaForCausalLM(config)


def falcon_h1() -> PreTrainedModel:
    config = transformers.FalconH1Config(**ATTENTION, **MAMBA2, mamba_d_ssm=64, mamba_n_heads=4)
    return transformers.FalconH1ForCausalLM(config)


STATES = {build.__name__: build for build in (mamba, mamba2, qwen3_next, lfm2, bamba, falcon_h1)}
