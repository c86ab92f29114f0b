"""static keeps the contract in all its configs."""

from __future__ import annotations

import pytest

from kvrack_spec.conform import expect_conformance


@pytest.mark.parametrize("settings", [(), ("attend_prefix=false",), ("max_cache_len=600",)], ids=str)
def test_static_conforms(settings: tuple[str, ...]) -> None:
    expect_conformance("static", settings, quick=True)
