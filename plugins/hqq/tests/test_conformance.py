"""hqq keeps the contract in the configs that differ in kind; as installed, tests/test_conformance.py judges it."""

from __future__ import annotations

import pytest

from kvrack_spec.conform import expect_conformance

CONFIGS = [
    ("nbits=2", "q_group_size=4", "residual_length=3", "sink_tokens=2"),
    ("nbits=3", "nbits_value=8", "axis_key=1", "axis_value=0", "q_group_size=30", "residual_length=0"),
    ("layout=static", "max_cache_len=600", "axis_key=1", "residual_length=8"),
]


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_hqq_conforms(settings: tuple[str, ...]) -> None:
    expect_conformance("hqq", settings, quick=True)
