"""The hqq codec: its bound, what it takes from hqq, groups that keep to themselves, and what it refuses."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from hqq.core.bitpack import BitPack
from hqq.core.optimize import optimize_weights_proximal_legacy

import kvrack
from kvrack import registry
from kvrack.codec import Role
from kvrack_hqq.codec import HqqCodec, _optimize_traced, optimize
from kvrack_hqq.config import HqqConfig

UNPACK = {
    1: BitPack.unpack_1bit_u8,
    2: BitPack.unpack_2bit_u8,
    3: BitPack.unpack_3bit_32,
    4: BitPack.unpack_4bit_u8,
    8: BitPack.unpack_8bit_u8,
}
BITS = sorted(UNPACK)


def states(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decoded(codec: HqqCodec, given: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(given)
    codec.decode(codec.encode(given), out)
    return out


def groups_and_zero(bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 40 groups of 64, hqq's scale for each, and the zero point it begins with."""
    groups = states(64, 40, seed=bits) ** 3 + 1
    low, high = groups.aminmax(dim=0, keepdim=True)
    inverse = (2**bits - 1) / (high - low)
    return groups, inverse, -low * inverse


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("role", ["keys", "values"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_head_dim_and_group_size_comes_back_within_the_bound(bits: int, role: Role, dtype: torch.dtype):
    for head_dim, group_size in itertools.product((64, 80, 17), (64, 30)):
        codec = HqqCodec(HqqConfig(nbits=bits, q_group_size=group_size), role)
        given = (3 * states(2, 3, 2 * codec.block_tokens, head_dim) + 1).to(dtype)
        # Part of a larger piece of memory, as scratch is.
        out = torch.full((2, 3, given.shape[2] + 3, head_dim), torch.nan, dtype=dtype)[:, :, 1:-2]
        codec.decode(codec.encode(given), out)
        grouped, restored = (codec._grouped(each.float()) for each in (given, out))
        # The bound is a group's, so much tighter than what the layer promises of a row and head.
        span = (grouped.amax(codec._axis, keepdim=True) - grouped.amin(codec._axis, keepdim=True)) / codec.levels
        allowed = 0.5 * span * (1 + 2**-6) + 2 * torch.finfo(dtype).eps * grouped.abs().amax()
        assert ((restored - grouped).abs() <= allowed).all()


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_it_decodes_what_hqq_packs(bits: int, axis: int) -> None:
    codec = HqqCodec(HqqConfig(nbits=bits, axis_key=axis), "keys")
    given = states(1, 1, 64, 64)
    encoded, out = codec.encode(given), decoded(codec, given)
    # Group for group as hqq has them: tokens by channels, or channels by tokens.
    first = (lambda each: each[0, 0]) if axis == 0 else (lambda each: each[0, 0].T)
    unpacked = UNPACK[bits](first(encoded["codes"]), dtype=torch.float32)[:64]
    expected = unpacked * first(encoded["scale"]) + first(encoded["offset"])
    torch.testing.assert_close(first(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", BITS)
def test_a_group_is_fitted_as_well_as_by_hqq_alone(bits: int) -> None:
    groups, inverse, zero = groups_and_zero(bits)
    levels = 2**bits - 1

    def error(zero: torch.Tensor) -> torch.Tensor:
        restored = ((groups * inverse + zero).round().clamp(0, levels) - zero) / inverse
        return (groups - restored).abs().mean(0)

    ours = error(optimize(groups, inverse, zero, levels))
    theirs = error(
        torch.cat(
            [
                optimize_weights_proximal_legacy(
                    groups[:, [i]], inverse[:, [i]], zero[:, [i]], [0, levels], axis=0, device="cpu"
                )[2]
                for i in range(groups.shape[1])
            ],
            dim=1,
        )
    )
    assert (ours <= error(zero)).all()
    assert ours.mean() < error(zero).mean()
    assert ours.mean() <= 1.03 * theirs.mean()


@pytest.mark.parametrize("bits", BITS)
def test_a_graph_fits_the_same(bits: int) -> None:
    problem = groups_and_zero(bits)
    levels = 2**bits - 1
    torch.testing.assert_close(_optimize_traced(*problem, levels), optimize(*problem, levels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_and_head_is_encoded_as_if_it_were_alone(bits: int, axis: int) -> None:
    codec = HqqCodec(HqqConfig(nbits=bits, axis_key=axis), "keys")
    given = states(3, 2, 128, 64) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1, 1)
    together = decoded(codec, given)
    for row, head in itertools.product(range(3), range(2)):
        part = (slice(row, row + 1), slice(head, head + 1))
        # Sums of other shapes round otherwise, which may tip single codes.
        differ = (decoded(codec, given[part]) - together[part]).abs().mean()
        assert differ <= 0.01 * (together[part] - given[part]).abs().mean()


def test_one_channel_far_above_the_others_leaves_attention_near_dense() -> None:
    # As the bias of Qwen2's k_proj makes them.
    keys, query = states(1, 1, 512, 64), states(1, 1, 8, 64, seed=1)
    keys[..., 3] += 30
    cache = kvrack.create_cache("hqq", kvrack.ModelSpec.uniform(1), residual_length=0)
    cache.update(keys, keys, 0)
    held = cache.layers[0].keys
    dense, coded = ((query @ each.transpose(2, 3) / 8).softmax(-1) for each in (keys, held))
    assert 0 < (dense - coded).abs().sum(-1).mean() <= 0.15


@pytest.mark.parametrize("tokens", [5, 55, 129, 300])
@pytest.mark.parametrize("bits", BITS)
def test_any_number_of_tokens_and_unequal_head_dims(tokens: int, bits: int) -> None:
    cache = kvrack.create_cache("hqq", kvrack.ModelSpec.uniform(1), nbits=bits, residual_length=0)
    keys, values = states(1, 2, tokens, 24), states(1, 2, tokens, 16)
    cache.update(keys, values, 0)
    shown_keys, shown_values = cache.update(keys[:, :, :3], values[:, :, :3], 0)
    assert shown_keys.shape == (1, 2, tokens + 3, 24)
    assert shown_values.shape == (1, 2, tokens + 3, 16)
    assert shown_keys.isfinite().all()
    assert shown_values.isfinite().all()


def test_bits_for_keys_and_values_apart() -> None:
    cache = kvrack.create_cache("hqq", kvrack.ModelSpec.uniform(1), nbits_key=8, nbits_value=2, residual_length=0)
    cache.update(states(1, 2, 256, 64), states(1, 2, 256, 64), 0)
    storage = cache.layers[0].storage()
    assert storage["keys.codes"].shape == (1, 2, 256, 64)
    # Sinks are by the bits of each: there are none where 8 bits are precise enough.
    assert "keys.sinks" not in storage
    assert storage["values.sinks"].shape[2] == 32
    assert storage["values.codes"].shape == (1, 2, 256 - 32, 16)


def test_a_cache_filled_with_grad_is_copied_detached() -> None:
    cache = kvrack.create_cache("hqq", kvrack.ModelSpec.uniform(1))
    given = states(1, 2, 300, 64).requires_grad_()
    cache.update(given, given, 0)
    copied = copy.deepcopy(cache)
    assert not any(tensor.requires_grad for tensor in copied.layers[0].storage().values())
    assert torch.equal(copied.layers[0].keys, cache.layers[0].keys)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"nbits": 5}, "nbits: input should be 1, 2, 3, 4 or 8, got 5"),
        ({"axis_key": -1}, "axis_key: input should be 0 or 1, got -1"),
        ({"q_group_size": 0}, "q_group_size"),
        ({"nbit": 4}, "Did you mean 'nbits'"),
    ],
)
def test_config_is_refused_in_words(config: dict[str, int], text: str) -> None:
    with pytest.raises(kvrack.InvalidConfig, match=text):
        kvrack.resolve("hqq", config)


def test_quantized_names_it() -> None:
    resolved = kvrack.resolve("quantized", {"backend": "hqq", "nbits": 3})
    assert resolved.backend.name == "hqq"
    assert resolved.config.nbits == 3


@pytest.mark.parametrize("found", [None, "0.1.8"])
def test_a_missing_or_old_hqq_is_told_with_the_pip_line(monkeypatch: pytest.MonkeyPatch, found: str | None) -> None:
    def version(distribution: str) -> str:
        if found is None:
            raise registry.PackageNotFoundError(distribution)
        return found

    monkeypatch.setattr(registry, "version", version)
    with pytest.raises(ImportError, match=r"Run: pip install 'hqq>=0\.2\.8'"):
        kvrack.resolve("hqq")
