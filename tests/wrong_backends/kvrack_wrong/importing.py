"""Fault: the entry point's module imports torch."""

import torch

from kvrack import Backend, hookimpl


@hookimpl
def kvrack_backend(name: str) -> Backend:
    assert torch.__version__
    return Backend(name=name, summary="imports torch", layer="kvrack_dynamic.layer:DynamicLayer",
                   config="kvrack_dynamic.layer:DynamicConfig")  # fmt: skip
