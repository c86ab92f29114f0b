from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvrack

sys.path.insert(0, str(Path(__file__).parent))
from offload_helpers import spec


@pytest.fixture
def on_disk(tmp_path) -> Callable[..., kvrack.Cache]:
    """Return a function that builds a cache whose file is in the test's folder."""

    def build(*kinds: str, **config) -> kvrack.Cache:
        return kvrack.create_cache("offload", spec(*kinds), 512, tier="disk", folder=str(tmp_path), **config)

    return build
