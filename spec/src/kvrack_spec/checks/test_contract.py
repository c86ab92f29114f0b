"""Contract and signatures: what holds before any token comes."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import kvrack
from kvrack.backend import swallows_arguments
from kvrack.config import validate_config
from kvrack.layer import AttentionLayer
from kvrack.model import LayerSpec
from kvrack_spec.compare import expect_same
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.subject import Subject, layer_spec

METHODS = (
    "update", "early_initialization", "get_seq_length", "get_mask_sizes", "get_max_length", "reset", "check_crop",
    "crop", "activate_past_recording", "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "to",
    "offload", "prefetch", "storage", "metadata", "restore", "twin",
)  # fmt: skip


@pytest.mark.rule("L1")
def test_signatures_are_the_protocols(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    for method in METHODS:
        function = getattr(type(layer), method)
        swallowed = swallows_arguments(function)
        expect(swallowed is None, f"{method} to name its arguments", f"{swallowed} swallows them")
        wanted = list(inspect.signature(getattr(AttentionLayer, method)).parameters)
        expect_equal(list(inspect.signature(function).parameters), wanted, f"parameters of {method}")


@pytest.mark.rule("B1")
def test_nothing_is_allocated_when_built(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    expect_equal(list(layer.storage()), [], "storage() of a new layer")
    expect_equal(layer.is_initialized, False, "is_initialized of a new layer")
    expect_equal(int(layer.get_seq_length()), 0, "get_seq_length() of a new layer")
    expect_equal(layer.nbytes, 0, "nbytes of a new layer")


@pytest.mark.rule("B2")
def test_unknown_key_is_refused_with_the_valid_ones(subject: Subject) -> None:
    valid = type(kvrack.resolve(subject.name, subject.settings).config).model_fields
    with pytest.raises(kvrack.InvalidConfig) as caught:
        kvrack.resolve(subject.name, {**subject.settings, "banana": 1})
    for key in ("banana", *valid):
        expect(key in str(caught.value), f"the error to name {key}", str(caught.value))


@pytest.mark.rule("B2")
def test_config_is_frozen_and_its_dict_is_not_consumed(subject: Subject) -> None:
    given = dict(subject.settings)
    first = kvrack.resolve(subject.name, given).config
    expect_equal(given, subject.settings, "the dict given, afterwards,")
    expect_equal(kvrack.resolve(subject.name, given).config, first, "config resolved a second time")
    for key in type(first).model_fields:
        with pytest.raises(ValueError, match="frozen"):
            setattr(first, key, getattr(first, key))
    expect_equal(type(first).model_config.get("frozen"), True, "model_config['frozen']")


@pytest.mark.rule("B3")
def test_capabilities_are_of_the_built_layer_and_lasting(subject: Subject, kind: str) -> None:
    layer = subject.layer(kind)
    declared = layer.capabilities
    expect(isinstance(declared, kvrack.backend.Capabilities), "a Capabilities", type(declared).__name__)
    expect_equal(subject.layer(kind).capabilities, declared, "capabilities of a layer built alike")
    subject.fill(layer, 9, 2)
    expect_equal(layer.capabilities, declared, "capabilities after updates")


@pytest.mark.rule("B6")
def test_resolving_imports_no_library(subject: Subject) -> None:
    backend = kvrack.resolve(subject.name, subject.settings).backend
    wrapped = {canonicalize_name(Requirement(text).name) for text in backend.requires}
    modules = {"torch"}
    if wrapped:
        for module, names in packages_distributions().items():
            if wrapped & {canonicalize_name(name) for name in names}:
                modules.add(module)
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from kvrack.registry import load_backend\n"
        f"load_backend({backend.name!r})\n"
        f"print(*sorted(set({sorted(modules)!r}) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    expect(done.returncode == 0, "the backend to resolve in a fresh process", done.stderr.strip()[-300:])
    expect_equal(done.stdout.split(), [], "modules imported too early")


@pytest.mark.rule("B7")
def test_config_survives_json(subject: Subject) -> None:
    config = kvrack.resolve(subject.name, subject.settings).config
    again = validate_config(
        subject.name, type(config), config.model_validate_json(config.model_dump_json()).model_dump()
    )
    expect_equal(again, config, "config dumped and validated again")


@pytest.mark.rule("B9")
def test_unserved_layer_is_refused_when_built(subject: Subject) -> None:
    layer = subject.layer("full")
    expect(isinstance(layer, AttentionLayer), "an AttentionLayer for a layer of full attention", type(layer).__name__)
    for kind in ("sliding", "chunked"):
        try:
            subject.layer(kind)
        except kvrack.UnsupportedOperation:
            expect(not subject.serves(kind), f"a {kind} layer, as promised", "UnsupportedOperation when built")
        else:
            if not subject.serves(kind):
                broken(f"UnsupportedOperation when a {kind} layer is built", "a layer")


@pytest.mark.rule("L12")
def test_storage_and_metadata_are_plain(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind)
    storage = layer.storage()
    expect(bool(storage), "storage() of a layer with tokens to name its tensors", "{}")
    for name, tensor in storage.items():
        expect(isinstance(tensor, torch.Tensor), f"storage()[{name!r}] to be a tensor", type(tensor).__name__)
        expect(
            tensor.dim() > 0 and tensor.shape[0] == 3, f"storage()[{name!r}] batch first, 3 rows", tuple(tensor.shape)
        )
    for name, number in layer.metadata().items():
        expect(type(number) is int, f"metadata()[{name!r}] to be a plain int", type(number).__name__)


@pytest.mark.rule("L12")
def test_restore_takes_on_the_whole_state(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind)
    other = subject.layer(kind)
    other.update(*subject.states(4))
    given = layer.storage()
    other.restore(given, layer.metadata())
    for tensor in other.storage().values():
        shared = {each.untyped_storage().data_ptr() for each in given.values() if each.numel()}
        if tensor.numel():
            expect(
                tensor.untyped_storage().data_ptr() not in shared, "restore to copy", "memory shared with its source"
            )
    expect_same(other, layer, *subject.states(1, seed=99))


@pytest.mark.rule("L13")
def test_nbytes_is_what_is_allocated(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind)
    least = sum(tensor.numel() * tensor.element_size() for tensor in layer.storage().values())
    expect(type(layer.nbytes) is int, "nbytes to be an int", type(layer.nbytes).__name__)
    expect(layer.nbytes >= least, f"nbytes of {least} or more, what storage() holds,", layer.nbytes)


@pytest.mark.rule("L32")
def test_twin_is_new_and_alike(subject: Subject, kind: str) -> None:
    layer = subject.filled(kind)
    twin = layer.twin()
    expect_equal(list(twin.storage()), [], "storage() of a twin")
    expect_equal(twin.capabilities, subject.capabilities(kind), "capabilities of a twin")
    expect_same(twin, subject.layer(kind), *subject.states(7))


@pytest.mark.rule("L35")
def test_is_sliding_names_windows(subject: Subject, kind: str) -> None:
    spec: LayerSpec = layer_spec(kind)
    expect_equal(subject.layer(kind).is_sliding, spec.window is not None, f"is_sliding of a {kind} layer")
