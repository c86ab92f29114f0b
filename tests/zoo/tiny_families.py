"""Configs of tiny models, one for each family whose memory `kt.model_spec` derives in a way of its own.

The numbers in each differ from one another, so that one taken for another shows.
"""

from __future__ import annotations

from typing import Any

BASE = {
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MLA = {
    **BASE,
    **EXPERTS,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
HEADS = {"mamba_n_groups": 2, "mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_chunk_size": 4}
GATED_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 5,
}
DELTA = {**MIXED, "num_experts": 4, "linear_head_dim": 6, "linear_num_heads": 4, "linear_conv_kernel_dim": 5}

LATENT_ATTENTION: dict[str, dict[str, Any]] = {
    "axk1": MLA,
    "bailing_hybrid": {**MLA, **DELTA},
    "deepseek_v2": {**MLA, "topk_method": "greedy"},
    "deepseek_v3": MLA,
    "glm4_moe_lite": MLA,
    "kimi_linear": {**MLA, **DELTA},
    "longcat_flash": {
        **MLA,
        "num_layers": 1,
        "head_dim": 8,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 2,
        "moe_topk": 2,
    },
    "minicpm3": MLA,
    "mistral4": MLA,
    "sarvam_mla": MLA,
    "youtu": MLA,
}

STATES: dict[str, dict[str, Any]] = {
    "mamba": {**BASE, "state_size": 8},
    "falcon_mamba": {**BASE, "state_size": 8},
    "mamba2": {**BASE, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4},
    "jamba": {
        **BASE,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "use_mamba_kernels": False,
    },
    "bamba": {**BASE, **HEADS, "attn_layer_indices": [1]},
    "falcon_h1": {**BASE, **HEADS, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    "granitemoehybrid": {
        **BASE,
        **HEADS,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "shared_intermediate_size": 32,
    },
    "zamba2": {
        **BASE,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "chunk_size": 4,
        "num_hidden_layers": 4,
        "hybrid_layer_ids": [1, 3],
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 1,
        "adapter_rank": 4,
        "use_mamba_kernels": False,
    },
    "nemotron_h": {
        **BASE,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "chunk_size": 4,
        "layers_block_type": ["mamba", "attention"],
    },
    "qwen3_next": {**BASE, **GATED_DELTA, **MIXED, "head_dim": 16, "num_experts": 0, "mlp_only_layers": [0, 1]},
    "qwen3_5_text": {**BASE, **GATED_DELTA, **MIXED, "head_dim": 16},
    "qwen3_5_moe_text": {
        **BASE,
        **EXPERTS,
        **GATED_DELTA,
        **MIXED,
        "head_dim": 16,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {**BASE, **GATED_DELTA, **MIXED, "linear_num_value_heads": 2},
    "lara_mini": {**BASE, **GATED_DELTA, **MIXED},
    "lfm2": {**BASE, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**BASE, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 2},
    "lfm3": {**BASE, "layer_types": ["conv", "full_attention"]},
}
