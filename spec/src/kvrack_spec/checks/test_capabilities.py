"""Capabilities both ways: what is promised works, what is declined is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

import kvrack
from kvrack.backend import Capabilities
from kvrack.layer import AttentionLayer
from kvrack_spec.compare import Unchanged, expect_matching, expect_same, see, tolerance
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.oracle import shown
from kvrack_spec.subject import PROMISE_OF_KIND, Shape, Subject
from kvrack_spec.tags import tagged, tokens_seen

SMALL = 24
"""Tokens that layers are built for where going past it is the point."""


# --- promised: it works -------------------------------------------------------------------------


@pytest.mark.rule("B4")
@pytest.mark.capability("grows")
@pytest.mark.parametrize("max_length", [SMALL, None], ids=["past-max_length", "no-max_length"])
def test_grows_without_end(subject: Subject, kind: str, max_length: int | None) -> None:
    layer = subject.layer(kind, max_length=max_length)
    given = 0
    for new in (SMALL - 2, *[1] * 120):
        seen = see(layer, *tagged(given, new, Shape(1, 1), subject.device))
        given += new
    expect_equal(int(layer.get_seq_length()), given, "get_seq_length()")
    tokens = tokens_seen(seen.keys)
    if seen.any_order:
        tokens = sorted(tokens)
    expect_equal(tokens, shown(given, len(tokens), layer.capabilities.sinks), "tokens that attention sees")


@pytest.mark.rule("L24", "B4")
@pytest.mark.capability("early_init")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_early_initialization_is_as_a_first_update(subject: Subject, kind: str, dtype: torch.dtype) -> None:
    layer = subject.layer(kind)
    value_dim = 32 if layer.capabilities.unequal_head_dim else 16
    shape = Shape(3, 2, 16, value_dim, dtype)
    layer.early_initialization(3, 2, 16, value_dim, dtype, torch.device(subject.device))
    expect(layer.is_initialized, "is_initialized after early_initialization", False)
    expect_equal(int(layer.get_seq_length()), 0, "get_seq_length() after early_initialization")
    layer.early_initialization(1, 1, 8, 8, torch.float32, torch.device(subject.device))
    twin = subject.layer(kind)
    for step, new in enumerate((7, 1, 1)):
        expect_same(layer, twin, *subject.states(new, shape, seed=step))


@pytest.mark.rule("L24")
@pytest.mark.capability("early_init")
def test_early_initialization_decides_the_batch(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    layer.early_initialization(2, 2, 16, 16, torch.float32, torch.device(subject.device))
    try:
        layer.update(*subject.states(3, Shape(batch=3)))
    except kvrack.ShapeMismatch:
        return
    broken("ShapeMismatch for 3 rows after early_initialization of 2", "no error")


@pytest.mark.rule("L25", "B4")
@pytest.mark.capability("offloads")
@pytest.mark.parametrize("fill", [(0, 0), (9, 3), (55, 90)], ids=str)
def test_offload_and_prefetch_lose_nothing(subject: Subject, kind: str, fill: tuple[int, int]) -> None:
    layer, twin = subject.filled(kind, *fill), subject.filled(kind, *fill)
    calls: list[Callable[[AttentionLayer], None]] = [AttentionLayer.prefetch, AttentionLayer.offload]
    where = {name: tensor.device for name, tensor in layer.storage().items()}
    for call in (calls[0], calls[1], calls[1]):
        with Unchanged(layer, call.__name__) if subject.device == "cpu" else _nothing():
            getattr(layer, call.__name__)()
    for name, tensor in layer.storage().items():
        expect_equal(tensor.device.type, "cpu", f"device of storage()[{name!r}] after offload()")
    for _ in range(2):
        layer.prefetch()
    for name, tensor in layer.storage().items():
        expect_equal(tensor.device, where[name], f"device of storage()[{name!r}] after prefetch()")
    for seed in (70, 71):
        expect_same(layer, twin, *subject.states(1, seed=seed))


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _expect_compiled_is_eager(subject: Subject, kind: str) -> None:
    layer, twin = subject.layer(kind), subject.layer(kind)
    torch._dynamo.reset()
    compiled = torch.compile(layer.update, fullgraph=layer.capabilities.compiles, backend="eager")
    try:
        for step, new in enumerate((9, 1, 1, 1)):
            keys, values = subject.states(new, seed=step)
            wanted = twin.update(keys, values)
            try:
                returned = compiled(keys, values)
            except kvrack.UnsupportedOperation as error:
                _expect_named(error, "compiles")
                return
            for what, one, other in zip(("keys", "values"), returned, wanted, strict=True):
                expect_equal(tuple(one.shape), tuple(other.shape), f"compiled, returned {what} of shape")
                used = slice(0, int(twin.get_seq_length()))
                expect(torch.equal(one[:, :, used], other[:, :, used]), f"compiled, the {what} of eager mode", "others")
            expect_equal(layer.get_seq_length(), twin.get_seq_length(), "compiled, get_seq_length()")
    finally:
        torch._dynamo.reset()


@pytest.mark.rule("L30", "B4")
@pytest.mark.capability("compiles")
def test_update_compiles_without_a_graph_break(subject: Subject, kind: str) -> None:
    _expect_compiled_is_eager(subject, kind)


@pytest.mark.rule("L30")
def test_compiled_update_is_right_or_refused(subject: Subject, kind: str) -> None:
    if subject.capabilities(kind).compiles:
        pytest.skip("compiles is promised: the check without a graph break says more")
    _expect_compiled_is_eager(subject, kind)


@pytest.mark.rule("L31", "B4")
@pytest.mark.capability("stable_address")
def test_addresses_are_kept(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind, 3, 0)
    before = _addresses(layer)
    subject.fill(layer, 0, 30)
    expect_equal(_addresses(layer), before, "addresses of storage() after 30 updates")
    layer.reorder_cache(torch.tensor([2, 0, 1], device=subject.device))
    expect_equal(_addresses(layer), before, "addresses of storage() after reorder_cache")
    if layer.is_croppable:
        layer.crop(-1)
        expect_equal(_addresses(layer), before, "addresses of storage() after crop(-1)")


def _addresses(layer: AttentionLayer) -> dict[str, int]:
    return {name: tensor.untyped_storage().data_ptr() for name, tensor in layer.storage().items()}


# --- declined: it is refused --------------------------------------------------------------------


def _expect_named(error: Exception, promise: str) -> None:
    expect(
        re.search(rf"\b{promise}\b", str(error)) is not None,
        f"the error to name the capability {promise}",
        str(error),
    )
    remedy = getattr(error, "remedy", "")
    expect(bool(remedy), "the error to name a remedy", repr(remedy))


def _expect_refused(layer: AttentionLayer, promise: str, what: str, call: Callable[[], object]) -> None:
    with Unchanged(layer, f"a refused {what}"):
        try:
            call()
        except kvrack.UnsupportedOperation as error:
            _expect_named(error, promise)
        except Exception as error:
            broken(f"UnsupportedOperation for {what}, with {promise}=False", f"{type(error).__name__}: {error}")
        else:
            broken(f"UnsupportedOperation for {what}, with {promise}=False", "no error")


def _call(subject: Subject, layer: AttentionLayer, promise: str) -> tuple[str, Callable[[], object]]:
    """Return what a layer that declines `promise` must refuse, in words and as a call."""
    if promise == "chunked_prefill":
        return "an update of 2 tokens", lambda: layer.update(*subject.states(2, seed=4))
    if promise == "unequal_head_dim":
        return "head_dims 16 and 32", lambda: layer.update(*subject.states(3, Shape(value_dim=32)))
    if promise == "crops":
        return "crop(-1)", lambda: layer.crop(-1)
    if promise == "records_past":
        return "activate_past_recording()", layer.activate_past_recording
    if promise == "early_init":
        device = torch.device(subject.device)
        return "early_initialization", lambda: layer.early_initialization(3, 2, 16, 16, torch.float32, device)
    assert promise == "offloads", promise
    return "offload()", layer.offload


@pytest.mark.rule("B5")
@pytest.mark.refusal
def test_declined_is_refused_by_name(subject: Subject, declined: tuple[str, str]) -> None:
    promise, kind = declined
    if promise in PROMISE_OF_KIND.values():
        refused_kind = next(each for each, needed in PROMISE_OF_KIND.items() if needed == promise)
        try:
            subject.layer(refused_kind)
        except kvrack.UnsupportedOperation as error:
            _expect_named(error, promise)
            return
        broken(f"UnsupportedOperation when a {refused_kind} layer is built, with {promise}=False", "a layer")
    empty = promise in ("unequal_head_dim", "early_init")
    layer = subject.layer(kind) if empty else subject.filled(kind)
    what, call = _call(subject, layer, promise)
    if promise == "records_past" and kind == "full" and layer.capabilities.crops:
        # All of the past is kept anyway: recording may be refused or change nothing.
        try:
            call()
        except kvrack.UnsupportedOperation as error:
            _expect_named(error, promise)
        layer.crop(-1)
        return
    _expect_refused(layer, promise, what, call)
    if promise == "crops":
        _expect_refused(layer, promise, "check_crop(-1)", lambda: layer.check_crop(-1))
        expect_equal(layer.is_croppable, False, "is_croppable with crops=False")


@pytest.mark.rule("L9", "B5")
@pytest.mark.capability("grows")
@pytest.mark.refusal
@pytest.mark.parametrize("once", [True, False], ids=["at-once", "one-by-one"])
def test_capacity_is_enforced_before_anything_is_written(subject: Subject, kind: str, once: bool) -> None:
    layer = subject.layer(kind, max_length=SMALL)
    if layer.capabilities.grows:
        pytest.skip("grows is promised: there is no capacity")
    capacity = layer.get_max_length()
    if layer.is_sliding and capacity < 0:
        capacity = SMALL
    held = 0
    if not once:
        subject.fill(layer, capacity - 1, 1)
        held = capacity
    asked = capacity + 3 if once else 1
    keys, values = subject.states(asked, seed=30)
    with Unchanged(layer, "an update past the capacity"):
        try:
            layer.update(keys, values)
        except kvrack.CapacityExceeded as error:
            for word, number in (("capacity", capacity), ("held", held), ("asked", asked)):
                expect(str(number) in str(error), f"the error to name {word} ({number})", str(error))
            return
        except Exception as error:
            broken("CapacityExceeded for an update past the capacity", f"{type(error).__name__}: {error}")
        if not layer.is_sliding:
            broken(f"CapacityExceeded: capacity {capacity}, held {held}, asked {asked}", "no error")
    # A window that was not exceeded: what it shows must then be right.
    pytest.skip("the window bounds what is held: its capacity is never met")


@pytest.mark.rule("L9")
def test_capacity_can_be_filled(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind, max_length=SMALL)
    twin = subject.layer(kind)
    capacity = SMALL if layer.get_max_length() < 0 else layer.get_max_length()
    keys, values = subject.states(capacity - 1)
    layer.update(keys, values)
    twin.update(keys, values)
    keys, values = subject.states(1, seed=3)
    seen, wanted = see(layer, keys, values), see(twin, keys, values)
    expect_matching(seen, wanted.keys, wanted.values, tolerance(layer, keys.dtype))


@pytest.mark.rule("B3")
def test_every_promise_is_plain(subject: Subject, kind: str) -> None:
    declared = subject.capabilities(kind)
    for promise in Capabilities.describe():
        expect(type(getattr(declared, promise)) is bool, f"{promise} to be True or False", getattr(declared, promise))
    expect(type(declared.relative_error) is float, "relative_error to be a float", declared.relative_error)
