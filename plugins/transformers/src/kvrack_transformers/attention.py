"""The attention implementation "kvrack": torch's, with the queries that share a key-value head as its queries."""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "kvrack"


def register() -> None:
    """Let models take `NAME` as `attn_implementation`, with the masks of "sdpa"."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, grouped_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)


def unregister() -> None:
    """Undo `register`."""
    for interface in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        type(interface)._global_mapping.pop(NAME, None)


def grouped_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' "sdpa" does; of a single token, without reading a key-value head once for each query.

    The queries of one token that share a key-value head (grouped-query attention, Ainslie et al. 2023) all see the
    same tokens, so they may stand where the tokens of a prompt do: keys and values are read once for all of them,
    and never repeated. On CPUs torch's own `enable_gqa` leaves its fast kernel for half types, with or without a mask.

    Args:
        module: the model's attention module.
        query: ``[batch, heads, tokens, head_dim]``.
        key: ``[batch, kv_heads, held, head_dim]``; `heads` is a multiple of `kv_heads`.
        value: ``[batch, kv_heads, held, value_head_dim]``.
        attention_mask: as for torch's scaled_dot_product_attention, broadcast over heads or one for each.
        dropout: probability.
        scaling: factor of the products; None for ``head_dim ** -0.5``.
        **kwargs: whatever else the model tells its attention. Where anything of it matters, "sdpa" answers.

    Returns:
        ``[batch, tokens, heads, value_head_dim]``, and None for the weights.
    """
    batch, heads, tokens, head_dim = query.shape
    kv_heads = key.shape[1]
    matters = any(kwargs.get(name) is not None for name in ("softcap", "position_bias", "s_aux"))
    if tokens > 1 or heads == kv_heads or matters or kwargs.get("output_attentions"):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is not None and attention_mask.shape[1] == heads:
        attention_mask = attention_mask.reshape(attention_mask.shape[0], kv_heads, heads // kv_heads, -1)
    attended = torch.nn.functional.scaled_dot_product_attention(
        query.reshape(batch, kv_heads, heads // kv_heads, head_dim),
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
    )
    return attended.reshape(batch, 1, heads, -1), None
