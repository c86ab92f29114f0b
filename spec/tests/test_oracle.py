"""The oracle against tensors written out by hand."""

from __future__ import annotations

import torch

from kvrack_spec.oracle import Oracle


def _states(*numbers: float, rows: int = 1) -> torch.Tensor:
    return torch.tensor(numbers).view(1, 1, -1, 1).repeat(rows, 1, 1, 1)


def test_concatenates_and_shows_a_window() -> None:
    oracle = Oracle(window=3)
    keys, _ = oracle.update(_states(1, 2, 3, 4, 5), _states(1, 2, 3, 4, 5))
    assert keys.flatten().tolist() == [1, 2, 3, 4, 5]
    keys, values = oracle.update(_states(6), _states(-6))
    assert keys.flatten().tolist() == [4, 5, 6]
    assert values.flatten().tolist() == [4, 5, -6]
    assert oracle.length == 6


def test_crop_goes_back_past_the_window_and_never_below_zero() -> None:
    oracle = Oracle(window=3)
    oracle.update(_states(1, 2, 3, 4, 5), _states(1, 2, 3, 4, 5))
    oracle.crop(-3)
    keys, _ = oracle.update(_states(9), _states(9))
    assert keys.flatten().tolist() == [1, 2, 9]
    oracle.crop(-50)
    assert oracle.length == 0
    keys, _ = oracle.update(_states(7), _states(7))
    assert keys.flatten().tolist() == [7]


def test_rows_and_scales_are_picked_together() -> None:
    oracle = Oracle()
    states = torch.cat([_states(1, 2), _states(30, 40)])
    oracle.update(states, states)
    oracle.pick_rows(torch.tensor([1, 1, 0]))
    assert oracle.keys[:, 0, :, 0].tolist() == [[30, 40], [30, 40], [1, 2]]
    assert oracle.key_scale.flatten().tolist() == [40, 40, 2]


def test_a_copy_is_independent() -> None:
    oracle = Oracle()
    oracle.update(_states(1), _states(1))
    twin = oracle.copy()
    twin.update(_states(2), _states(2))
    assert (oracle.length, twin.length) == (1, 2)
