"""States that say who they are: each token's channels are the signs of its own number.

Structure (which tokens, which order, which rows) is checked with these, so that a codec's rounding
can't blur it: any codec that keeps signs keeps tags. What values come back is checked elsewhere.
"""

from __future__ import annotations

import torch

from kvrack_spec.subject import Shape

TOKEN_BITS, ROW_BITS, HEAD_BITS = 10, 2, 2
VALUE_BIT = TOKEN_BITS + ROW_BITS + HEAD_BITS
BITS = VALUE_BIT + 1


def tagged(
    start: int,
    count: int,
    shape: Shape = Shape(),  # noqa: B008
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of tokens ``start .. start + count - 1``, every channel 1 or -1.

    Both head_dims are `BITS` or more; batch and heads are at most 4, as the tags have two bits for each.
    """
    tokens = torch.arange(start, start + count).view(1, 1, -1)
    rows = torch.arange(shape.batch).view(-1, 1, 1) << TOKEN_BITS
    heads = torch.arange(shape.heads).view(1, -1, 1) << (TOKEN_BITS + ROW_BITS)
    numbers = tokens | rows | heads
    return (
        _signs(numbers, shape.key_dim).to(device, shape.dtype),
        _signs(numbers | (1 << VALUE_BIT), shape.value_dim).to(device, shape.dtype),
    )


def _signs(numbers: torch.Tensor, channels: int) -> torch.Tensor:
    bits = torch.arange(channels) % BITS
    return ((numbers.unsqueeze(-1) >> bits) & 1).float() * 2 - 1


def read_tags(states: torch.Tensor) -> torch.Tensor:
    """Return the number ``[batch, heads, tokens]`` that each token's signs spell, on the CPU."""
    bits = (states[..., :BITS].detach().cpu().float() > 0).long()
    return (bits << torch.arange(BITS)).sum(-1)


def tokens_seen(states: torch.Tensor) -> list[int]:
    """Return the token numbers that row 0, head 0 of `states` spells, in order."""
    return [int(number) & ((1 << TOKEN_BITS) - 1) for number in read_tags(states)[0, 0]]
