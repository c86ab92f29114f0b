"""The comparisons see what differs, and say where."""

from __future__ import annotations

import pytest
import torch

from kvrack_spec.compare import Seen, expect_close, expect_matching, same_bits
from kvrack_spec.expect import Broken


def test_bit_identical_means_bits() -> None:
    one = torch.zeros(1, 1, 2, 2)
    assert same_bits(one, one.clone())
    assert not same_bits(one, -one)
    assert same_bits(one / 0, one / 0)
    assert not same_bits(one, one.double())
    assert same_bits(torch.ones(3, 1).expand(3, 4), torch.ones(3, 4))


def test_a_difference_is_named_by_its_place() -> None:
    wanted = torch.zeros(2, 1, 3, 2)
    seen = wanted.clone()
    seen[1, 0, 2, 1] = 0.5
    with pytest.raises(Broken, match=r"keys bit-identical: 0 at row 1, head 0, token 2, channel 1, saw 0.5"):
        expect_close(seen, wanted, 0.0, "keys")


def test_a_bound_is_relative_to_the_row_and_head() -> None:
    wanted = torch.ones(2, 1, 1, 2)
    wanted[1] = 100
    seen = wanted.clone()
    seen[1] += 0.5
    expect_close(seen, wanted, 0.01, "keys")
    seen[0] += 0.5
    with pytest.raises(Broken, match="row 0"):
        expect_close(seen, wanted, 0.01, "keys")


def test_nan_is_never_within_a_bound() -> None:
    wanted = torch.ones(1, 1, 1, 2)
    with pytest.raises(Broken):
        expect_close(wanted * float("nan"), wanted, 0.5, "keys")


def test_any_order_is_one_order_for_keys_and_values() -> None:
    keys = torch.randn(2, 2, 5, 8)
    values = torch.randn(2, 2, 5, 8)
    order = torch.tensor([3, 4, 0, 1, 2])
    expect_matching(Seen(keys[:, :, order], values[:, :, order], 5, True), keys, values, 0.0)
    with pytest.raises(Broken):
        expect_matching(Seen(keys[:, :, order], values, 5, True), keys, values, 0.0)
    with pytest.raises(Broken):
        expect_matching(Seen(keys[:, :, order], values[:, :, order], 5, False), keys, values, 0.0)
