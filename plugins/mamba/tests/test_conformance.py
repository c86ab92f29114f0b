"""mamba keeps the contract, its states and its attention layers both."""

from __future__ import annotations

from kvrack_spec.conform import expect_conformance


def test_mamba_conforms() -> None:
    expect_conformance("mamba", quick=True)
