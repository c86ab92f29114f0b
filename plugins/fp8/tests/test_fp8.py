"""The fp8 codec: its bound, its bytes, and what it refuses."""

import pytest
import torch

import kvrack

SPEC = kvrack.ModelSpec.uniform(1)


def held_after(states: list[torch.Tensor]) -> torch.Tensor:
    """Return the keys that a cache gives back once all `states` are encoded."""
    cache = kvrack.create_cache("fp8", SPEC)
    for state in states:
        cache.update(state, state, 0)
    return cache.layers[0].keys


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_stays_within_the_bound_of_each_token(dtype):
    states = torch.randn(2, 3, 40, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    error = (held_after([states]).double() - states.double()).abs().amax(-1)
    assert error.max() > 0
    rounding = torch.finfo(dtype).eps
    assert (error <= states.double().abs().amax(-1) * (16 / 448 + rounding)).all()


def test_what_comes_ten_times_larger_is_not_clipped():
    states = torch.randn(1, 2, 8, 16, generator=torch.Generator().manual_seed(1))
    held = held_after([states, 10 * states])
    torch.testing.assert_close(held[:, :, 8:], 10 * held[:, :, :8], rtol=1e-5, atol=0.0)


def test_zeros_and_tiny_numbers_come_back_finite():
    zeros = torch.zeros(1, 1, 33, 16)
    tiny = torch.full((1, 1, 33, 16), 1e-42)
    held = held_after([zeros, tiny])
    assert torch.equal(held[:, :, :33], zeros)
    assert held.isfinite().all()


def test_tokens_that_come_singly_wait_exact_and_are_encoded_once_by_the_dozen():
    cache = kvrack.create_cache("fp8", SPEC)
    states = torch.randn(1, 2, 80, 16, generator=torch.Generator().manual_seed(2))
    seen = []
    for token in range(80):
        cache.update(states[:, :, token : token + 1], states[:, :, token : token + 1], 0)
        seen.append(cache.layers[0].keys.clone())
    for token, keys in enumerate(seen):
        exact = (token + 1) % 32
        assert torch.equal(keys[:, :, token + 1 - exact :], states[:, :, token + 1 - exact : token + 1])
        assert torch.equal(keys[:, :, : token + 1 - exact], seen[-1][:, :, : token + 1 - exact])
    assert not torch.equal(seen[-1][:, :, :64], states[:, :, :64])


def test_bytes_are_about_half_of_bfloat16():
    cache = kvrack.create_cache("fp8", SPEC, max_length=1000)
    states = torch.randn(1, 3, 1000, 64).to(torch.bfloat16)
    cache.update(states, states, 0)
    stored = sum(row.nbytes for row in cache.memory() if "scratch" not in row.role)
    assert stored <= 0.55 * 2 * states.nbytes


@pytest.mark.parametrize("key", ["nbits", "axis_key", "axis_value", "q_group_size", "residual_length"])
def test_keys_of_grouped_codecs_are_refused_by_name(key):
    with pytest.raises(kvrack.InvalidConfig, match=f"unknown key '{key}'"):
        kvrack.resolve("fp8", {key: 1})


def test_quantized_names_it():
    assert kvrack.resolve("quantized", {"backend": "fp8"}).backend.name == "fp8"
