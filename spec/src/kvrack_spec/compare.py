"""What a layer shows, and whether two layers, or a layer and the oracle, show the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvrack.layer import AttentionLayer
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.oracle import TOKENS, Oracle


@dataclass(frozen=True)
class Seen:
    """What attention sees after one update, unused slots left out.

    Attributes:
        keys: ``[batch, heads, tokens, key_head_dim]``.
        values: ``[batch, heads, tokens, value_head_dim]``.
        length: tokens seen by the layer.
        any_order: whether the slots may stand in any order (a full static window).
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int
    any_order: bool


def see(layer: AttentionLayer, keys: torch.Tensor, values: torch.Tensor) -> Seen:
    """Update `layer` and return what a mask built from its own mask sizes lets attention see."""
    new = keys.shape[TOKENS]
    _, offset = layer.get_mask_sizes(new)
    returned_keys, returned_values = layer.update(keys, values)
    length = int(layer.get_seq_length())
    any_order = layer.is_compileable and layer.is_sliding
    if layer.is_compileable:
        window = layer.spec.window
        first = 0 if window is None else max(0, length - (window - 1 + new))
        used = slice(max(0, first - offset), max(0, length - offset))
        returned_keys, returned_values = returned_keys[:, :, used], returned_values[:, :, used]
    # A layer may write into what it returned at its next update (L11): what is compared later is copied.
    return Seen(returned_keys.detach().clone(), returned_values.detach().clone(), length, any_order)


def oracle_of(layer: AttentionLayer) -> Oracle:
    """Return the oracle of a layer: of the model's window, or of the one that a full layer declares."""
    window = layer.spec.window if layer.is_sliding else layer.capabilities.window
    return Oracle(window, layer.capabilities.sinks)


def tolerance(layer: AttentionLayer, dtype: torch.dtype, times: float = 1.0) -> float:
    """Return the error allowed relative to the largest magnitude of a row and head; 0 where lossless."""
    if layer.capabilities.lossless:
        return 0.0
    return times * (layer.capabilities.relative_error + torch.finfo(dtype).eps)


def expect_close(
    seen: torch.Tensor, expected: torch.Tensor, allowed: float, what: str, scale: torch.Tensor | None = None
) -> None:
    """Raise Broken unless `seen` is `expected`, bit for bit where `allowed` is 0, else within it.

    Args:
        scale: ``[batch, heads, 1, 1]``, what `allowed` is relative to; the largest magnitude of
            each row and head of `expected` when None.
    """
    expect_equal(tuple(seen.shape), tuple(expected.shape), f"{what} of shape")
    if seen.numel() == 0:
        return
    if allowed == 0.0:
        if torch.equal(seen, expected):
            return
        wrong = (seen != expected) | seen.isnan()
    else:
        magnitude = expected.abs().amax(dim=(2, 3), keepdim=True).double() if scale is None else scale.double()
        error = (seen.double() - expected.double()).abs()
        wrong = ~(error <= allowed * magnitude)
        if not wrong.any():
            return
    index = tuple(int(i) for i in wrong.nonzero()[0])
    bound = "bit-identical" if allowed == 0.0 else f"within {allowed:.3g} of the row's and head's largest magnitude"
    share = 100.0 * wrong.float().mean().item()
    broken(
        f"{what} {bound}: {expected[index].item():.6g} at {_where(index)}",
        f"{seen[index].item():.6g} ({share:.1f}% of the elements differ)",
    )


def expect_same(
    layer: AttentionLayer, twin: AttentionLayer, keys: torch.Tensor, values: torch.Tensor, times: float = 0.0
) -> None:
    """Raise Broken unless both layers have the same length and mask sizes and answer an update alike.

    Args:
        times: how many times the layer's bound two answers may differ, where it is lossy; 0 asks
            for bit-identical ones.
    """
    expect_equal(layer.get_seq_length(), twin.get_seq_length(), "get_seq_length()")
    for new in (1, 2):
        expect_equal(layer.get_mask_sizes(new), twin.get_mask_sizes(new), f"get_mask_sizes({new})")
    seen, wanted = see(layer, keys, values), see(twin, keys, values)
    expect_matching(seen, wanted.keys, wanted.values, tolerance(layer, keys.dtype, times))


def expect_matching(
    seen: Seen,
    keys: torch.Tensor,
    values: torch.Tensor,
    allowed: float,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> None:
    """Raise Broken unless what was seen is these keys and values, within `allowed`."""
    expect_equal(seen.keys.shape[TOKENS], keys.shape[TOKENS], "tokens that attention sees")
    seen_keys, seen_values = seen.keys, seen.values
    if seen.any_order:
        order = _order(seen_keys, keys)
        seen_keys, seen_values = seen_keys[:, :, order], seen_values[:, :, order]
    expect_close(seen_keys, keys, allowed, "keys", key_scale)
    expect_close(seen_values, values, allowed, "values", value_scale)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of any dtype are equal bit for bit, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def _order(seen: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return which slot of `seen` holds each token of `expected`: one order for all rows and heads."""
    flat = [states.transpose(0, TOKENS).flatten(1).double() for states in (expected, seen)]
    order = torch.cdist(flat[0], flat[1]).argmin(dim=1)
    # Tokens that are equal (zeros, constants) may name the same slot; their order is then free.
    if len(set(order.tolist())) < len(order):
        return torch.arange(len(order), device=seen.device)
    return order


def _where(index: tuple[int, ...]) -> str:
    names = ("row", "head", "token", "channel")
    return ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=False))


class Unchanged:
    """Context manager that raises Broken if a layer's state differs at the end from what it was.

    Reads `storage()`, `metadata()` and the length; with `keys` and `values` to probe with, use
    `expect_same` against a twin besides.
    """

    def __init__(self, layer: AttentionLayer, by: str) -> None:
        self.layer = layer
        self.by = by

    def __enter__(self) -> Unchanged:
        self.storage = {name: tensor.clone() for name, tensor in self.layer.storage().items()}
        self.metadata = dict(self.layer.metadata())
        self.length = self.layer.get_seq_length()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is not None:
            return
        storage = self.layer.storage()
        expect_equal(sorted(storage), sorted(self.storage), f"after {self.by}, unchanged storage() of")
        for name, before in self.storage.items():
            expect(same_bits(storage[name], before), f"{self.by} to change nothing", f"storage()[{name!r}] changed")
        expect_equal(self.layer.metadata(), self.metadata, f"after {self.by}, unchanged metadata()")
        expect_equal(self.layer.get_seq_length(), self.length, f"after {self.by}, unchanged length")
