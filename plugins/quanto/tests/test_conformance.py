"""quanto keeps the contract in the configs that differ in kind; as installed, tests/test_conformance.py judges it."""

from __future__ import annotations

import pytest

from kvrack_spec.conform import expect_conformance

CONFIGS = [
    ("nbits=2", "q_group_size=4", "residual_length=3", "sink_tokens=2"),
    ("axis_key=0", "axis_value=-1", "q_group_size=30", "residual_length=0"),
]


@pytest.mark.parametrize("settings", CONFIGS, ids=str)
def test_quanto_conforms(settings: tuple[str, ...]) -> None:
    expect_conformance("quanto", settings, quick=True)
