"""A second device: an accelerator where there is one, else torch's meta device, which keeps shapes and no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvrack_spec.expect import broken

MAY_MIX = {
    torch.ops.aten.copy_.default,
    torch.ops.aten._to_copy.default,
    # Accelerators take indices on the CPU here, though not in index_select.
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
}


def another_device(device: str) -> torch.device:
    """Return a device that isn't `device`."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if torch.device(device).type != "cpu":
        return torch.device("cpu")
    return torch.device("meta") if accelerator is None else accelerator


class OneDeviceAtATime(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, an operation on tensors of two devices is a broken rule, as on accelerators it is an error: the
    meta device lets it pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        devices = sorted({str(tensor.device) for tensor in given})
        if len(devices) > 1 and func not in MAY_MIX:
            broken("each operation on tensors of one device", f"{func} on {' and '.join(devices)}")
        return func(*args, **(kwargs or {}))
