"""The quanto codec: its bound, what it takes from optimum-quanto, and that nothing is ever built."""

from __future__ import annotations

import copy
import itertools
import logging
from importlib import reload

import pytest
import torch
from optimum.quanto import MaxOptimizer, qint2, qint4, quantize_weight
from optimum.quanto.library.extensions.extension import Extension

import kvrack
import kvrack_quanto.codec
from kvrack import registry
from kvrack.codec import Role
from kvrack_quanto.codec import QuantoCodec
from kvrack_quanto.config import QuantoConfig


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every use of quanto's C++ extension fail, as where it can't be built."""

    def build(self: Extension) -> None:
        raise OSError("no compiler here")

    monkeypatch.setattr(Extension, "lib", property(build))


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_head_dim_and_group_size_comes_back_within_the_bound(bits: int, role: Role, dtype: torch.dtype) -> None:
    for head_dim, group_size in itertools.product((64, 80, 17), (64, 30)):
        codec = QuantoCodec(QuantoConfig(nbits=bits, q_group_size=group_size), role)
        given = (3 * states(2, 3, 2 * codec.block_tokens, head_dim) + 1).to(dtype)
        # Part of a larger piece of memory, as scratch is.
        out = torch.full((2, 3, given.shape[2] + 3, head_dim), torch.nan, dtype=dtype)[:, :, 1:-2]
        codec.decode(codec.encode(given), out)
        grouped, restored = (codec._grouped(each.float()) for each in (given, out))
        span = (grouped.amax(codec._axis, keepdim=True) - grouped.amin(codec._axis, keepdim=True)) / codec.levels
        allowed = 0.5 * span * (1 + 2**-6) + 2 * torch.finfo(dtype).eps * grouped.abs().amax()
        assert ((restored - grouped).abs() <= allowed).all()


@pytest.mark.parametrize(("bits", "qtype"), [(2, qint2), (4, qint4)])
@pytest.mark.parametrize("axis", [0, -1])
def test_it_is_what_quanto_gives_for_each_head(bits: int, qtype: object, axis: int) -> None:
    codec = QuantoCodec(QuantoConfig(nbits=bits, axis_key=axis), "keys")
    given = states(2, 3, 128, 64)
    out = torch.empty_like(given)
    codec.decode(codec.encode(given), out)
    for row, head, block in itertools.product(range(2), range(3), range(2)):
        part = given[row, head, 64 * block : 64 * block + 64]
        scale, shift = MaxOptimizer()(part, qtype, axis, 64)
        theirs = quantize_weight(part, qtype, axis, scale, shift, 64, optimized=False)
        codes = theirs._data._data
        # Their packed bytes, unpacked without the extension.
        parts = [(codes >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        unpacked = torch.cat(parts)
        expected = scale * unpacked - shift
        if axis == -1:
            expected = expected.reshape(64, 64)
        ours = out[row, head, 64 * block : 64 * block + 64]
        # A number half-way between two codes may be rounded either way.
        assert ((ours - expected).abs() > 1e-4).float().mean() <= 0.001


@pytest.mark.parametrize("tokens", [5, 55, 300])
@pytest.mark.parametrize("bits", [2, 4])
def test_any_number_of_tokens_and_unequal_head_dims(tokens: int, bits: int) -> None:
    cache = kvrack.create_cache("quanto", kvrack.ModelSpec.uniform(1), nbits=bits, residual_length=0)
    keys, values = states(1, 2, tokens, 24), states(1, 2, tokens, 16)
    cache.update(keys, values, 0)
    shown_keys, shown_values = cache.update(keys[:, :, :3], values[:, :, :3], 0)
    assert shown_keys.shape == (1, 2, tokens + 3, 24)
    assert shown_values.shape == (1, 2, tokens + 3, 16)
    assert shown_keys.isfinite().all()
    assert shown_values.isfinite().all()


def test_one_channel_far_above_the_others_leaves_attention_near_dense() -> None:
    # As the bias of Qwen2's k_proj makes them.
    keys, query = states(1, 1, 512, 64), states(1, 1, 8, 64, seed=1)
    keys[..., 3] += 30
    cache = kvrack.create_cache("quanto", kvrack.ModelSpec.uniform(1), residual_length=0)
    cache.update(keys, keys, 0)
    held = cache.layers[0].keys
    dense, coded = ((query @ each.transpose(2, 3) / 8).softmax(-1) for each in (keys, held))
    assert 0 < (dense - coded).abs().sum(-1).mean() <= 0.15


def test_a_cache_is_copied_detached_also_from_states_with_grad() -> None:
    cache = kvrack.create_cache("quanto", kvrack.ModelSpec.uniform(1))
    given = states(1, 2, 300, 64).requires_grad_()
    cache.update(given, given, 0)
    copied = copy.deepcopy(cache)
    assert not any(tensor.requires_grad for tensor in copied.layers[0].storage().values())
    assert torch.equal(copied.layers[0].keys, cache.layers[0].keys)


def test_a_line_in_the_log_says_that_plain_torch_serves(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        reload(kvrack_quanto.codec)
    lines = [record.message for record in caplog.records if record.name == "kvrack.quanto"]
    assert len(lines) == 1
    assert "C++ extension" in lines[0]


def test_config_is_refused_in_words() -> None:
    with pytest.raises(kvrack.InvalidConfig, match="nbits: input should be 2 or 4, got 3"):
        kvrack.resolve("quanto", {"nbits": 3})
    with pytest.raises(kvrack.InvalidConfig, match="axis_value: input should be 0 or -1, got 1"):
        kvrack.resolve("quanto", {"axis_value": 1})


def test_quantized_is_quanto_unless_told_otherwise() -> None:
    resolved = kvrack.resolve("quantized", {"nbits": 2})
    assert resolved.backend.name == "quanto"
    assert resolved.config.nbits == 2


@pytest.mark.parametrize("found", [None, "0.2.4"])
def test_a_missing_or_old_quanto_is_told_with_the_pip_line(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(distribution: str) -> str:
        if found is None:
            raise registry.PackageNotFoundError(distribution)
        return found

    monkeypatch.setattr(registry, "version", version)
    with pytest.raises(ImportError, match=r"Run: pip install 'optimum-quanto>=0\.2\.7'"):
        kvrack.resolve("quantized")
