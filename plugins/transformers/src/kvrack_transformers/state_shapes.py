"""The shapes of the states that models with Mamba, linear attention or convolution layers keep, by family.

Each family names its numbers in its own way, and none says what they make. What is here was compared with what
models of these families really hold, tiny ones with random weights; of any other family nothing is said.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvrack import StateShape

RECURRENT_DTYPE = "float32"
"""Models sum up recurrent states in float32, whatever their weights are."""


def state_shape(config: Any) -> StateShape | None:
    """Return the shape of the one state that a layer keeps, None for a family that isn't known.

    Args:
        config: of the text decoder, or of one of its layers.
    """
    of_family = FAMILIES.get(str(config.model_type))
    return None if of_family is None else of_family(config)


def _mamba(config: Any) -> StateShape:
    channels = config.intermediate_size
    return StateShape((channels, config.conv_kernel), (channels, config.state_size), RECURRENT_DTYPE)


def _jamba(config: Any) -> StateShape:
    channels = int(config.mamba_expand * config.hidden_size)
    return StateShape((channels, config.mamba_d_conv), (channels, config.mamba_d_state), RECURRENT_DTYPE)


def _heads(inner: int, groups: int, heads: int, head_dim: int, size: int, kernel: int) -> StateShape:
    # Mamba-2 convolves its inputs and the two matrices of each group together.
    return StateShape((inner + 2 * groups * size, kernel), (heads, head_dim, size), RECURRENT_DTYPE)


def _mamba2(config: Any) -> StateShape:
    inner = int(config.expand * config.hidden_size)
    return _heads(inner, config.n_groups, config.num_heads, config.head_dim, config.state_size, config.conv_kernel)


def _bamba(config: Any) -> StateShape:
    return _heads(
        getattr(config, "mamba_d_ssm", None) or int(config.mamba_expand * config.hidden_size),
        config.mamba_n_groups,
        config.mamba_n_heads,
        config.mamba_d_head,
        config.mamba_d_state,
        config.mamba_d_conv,
    )


def _zamba2(config: Any) -> StateShape:
    return _heads(
        int(config.mamba_expand * config.hidden_size),
        config.mamba_ngroups,
        config.n_mamba_heads,
        config.mamba_headdim,
        config.mamba_d_state,
        config.mamba_d_conv,
    )


def _nemotron_h(config: Any) -> StateShape:
    heads, head_dim = config.mamba_num_heads, config.mamba_head_dim
    return _heads(heads * head_dim, config.n_groups, heads, head_dim, config.ssm_state_size, config.conv_kernel)


def _gated_delta(config: Any) -> StateShape:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, value_dim = config.linear_num_value_heads, config.linear_value_head_dim
    return StateShape(
        (2 * keys + heads * value_dim, config.linear_conv_kernel_dim),
        (heads, config.linear_key_head_dim, value_dim),
        RECURRENT_DTYPE,
    )


def _delta(config: Any) -> StateShape:
    heads, head_dim = config.linear_num_heads, config.linear_head_dim
    return StateShape(
        (3 * heads * head_dim, config.linear_conv_kernel_dim), (heads, head_dim, head_dim), RECURRENT_DTYPE
    )


def _convolution(config: Any) -> StateShape:
    return StateShape((config.hidden_size, config.conv_L_cache))


FAMILIES: dict[str, Callable[[Any], StateShape]] = {
    "mamba": _mamba,
    "falcon_mamba": _mamba,
    "jamba": _jamba,
    "mamba2": _mamba2,
    "bamba": _bamba,
    "falcon_h1": _bamba,
    "granitemoehybrid": _bamba,
    "zamba2": _zamba2,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _gated_delta,
    "qwen3_5_text": _gated_delta,
    "qwen3_5_moe_text": _gated_delta,
    "olmo_hybrid": _gated_delta,
    "lara_mini": _gated_delta,
    "kimi_linear": _delta,
    "bailing_hybrid": _delta,
    "lfm2": _convolution,
    "lfm2_moe": _convolution,
    "lfm3": _convolution,
}
"""What a layer's state is made of, by the `model_type` of a config."""
