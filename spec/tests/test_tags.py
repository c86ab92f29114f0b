"""Tags spell what they were made of."""

from __future__ import annotations

import torch

from kvrack_spec.subject import Shape
from kvrack_spec.tags import HEAD_BITS, ROW_BITS, TOKEN_BITS, VALUE_BIT, read_tags, tagged, tokens_seen


def test_tags_spell_token_row_head_and_role() -> None:
    keys, values = tagged(500, 7, Shape(3, 3, 16, 24))
    assert keys.shape == (3, 3, 7, 16)
    assert values.shape == (3, 3, 7, 24)
    assert tokens_seen(keys) == list(range(500, 507))
    number = int(read_tags(values)[2, 1, 3])
    assert number == 503 | 2 << TOKEN_BITS | 1 << (TOKEN_BITS + ROW_BITS) | 1 << VALUE_BIT
    assert HEAD_BITS == 2


def test_tags_survive_any_rounding_that_keeps_signs() -> None:
    keys, _ = tagged(0, 40, Shape(dtype=torch.float16))
    assert tokens_seen(keys * 0.1 + 0.05) == list(range(40))
