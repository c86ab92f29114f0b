"""Encoder-decoder models give with a kvrack cache what they give without any, each side by any backend.

Where transformers itself is wrong about a model, the reason stands beside the case that is left out.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

import kvrack
import kvrack_transformers as kt
from kvrack.registry import installed
from kvrack_transformers import versions
from kvrack_transformers.versions import CACHE_ARGUMENT

sys.path.insert(0, str(Path(__file__).parent))
from conftest import exact_backends, lossy_backends
from tiny_encoder_decoders import ENCODER_DECODERS

pytestmark = pytest.mark.skipif("encoder-decoder" not in installed(), reason="kvrack-encoder-decoder is not installed")

STEPS = 6
PAIRS = [("dynamic", name) for name in ENCODER_DECODERS] + [
    (backend, name) for backend in exact_backends() if backend != "dynamic" for name in ("t5", "t5gemma")
]
LOSSY = lossy_backends()


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, models) -> tuple[str, PreTrainedModel]:
    """Each exact backend with encoder-decoder models."""
    backend, name = request.param
    return backend, models(name)


def source(model: PreTrainedModel, batch: int = 1) -> dict[str, torch.Tensor]:
    """Return what the encoder is given: sound, or text of which the first row is padded on the right."""
    generator = torch.Generator().manual_seed(2)
    if model.config.model_type == "whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=generator)}
    ids = torch.randint(2, 64, (batch, 11), generator=generator)
    mask = torch.ones_like(ids)
    if batch > 1:
        ids[0, 7:] = mask[0, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def target(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, ids: torch.Tensor, **settings) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": STEPS, "eos_token_id": 1, **settings}
    return model.generate(**source(model, len(ids)), decoder_input_ids=ids, **settings)


def fed(model: PreTrainedModel, ids: torch.Tensor, pieces: tuple[int, ...], cache) -> torch.Tensor:
    """Return the logits of a target fed in pieces to a model with this cache."""
    given = source(model, len(ids))
    with torch.no_grad():
        encoded = model.get_encoder()(**given)
        mask = {key: tensor for key, tensor in given.items() if key == "attention_mask"}
        return torch.cat(
            [
                model(
                    encoder_outputs=encoded, **mask, decoder_input_ids=piece, use_cache=True, **{CACHE_ARGUMENT: cache}
                ).logits
                for piece in ids.split(pieces, dim=1)
            ],
            dim=1,
        )


def without_cache(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**source(model, len(ids)), decoder_input_ids=ids, use_cache=False).logits


# --- equal to no cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(9, 1, 1, 1), (5, 4, 3)])
def test_a_target_fed_in_pieces(pair: tuple[str, PreTrainedModel], pieces: tuple[int, ...]) -> None:
    backend, model = pair
    ids = target(12, batch=2)
    cache = kt.create_cache(model, backend, max_length=64)
    assert isinstance(cache, EncoderDecoderCache)
    expected = without_cache(model, ids)
    assert expected.std() > 0.3, "logits too flat to tell a right cache from a wrong one"
    torch.testing.assert_close(fed(model, ids, pieces, cache), expected, rtol=1e-3, atol=1e-3)
    assert cache.get_seq_length() == 12
    assert set(cache.is_updated.values()) == {True}


@pytest.mark.parametrize("beams", [1, 3])
def test_greedy_and_beams(pair: tuple[str, PreTrainedModel], beams: int) -> None:
    backend, model = pair
    # Whisper's own generate fails on several sequences for one input.
    returned = {} if model.config.model_type == "whisper" else {"num_return_sequences": beams}
    expected = generate(model, target(4), num_beams=beams, use_cache=False, **returned)
    got = generate(model, target(4), num_beams=beams, cache_implementation=backend, **returned)
    assert torch.equal(got, expected)


def test_a_batch_padded_in_encoder_equals_each_row(pair: tuple[str, PreTrainedModel]) -> None:
    backend, model = pair
    ids = target(4, batch=2)
    assert torch.equal(generate(model, ids, cache_implementation=backend), generate(model, ids, use_cache=False))


def test_a_second_turn_on_the_same_cache(pair: tuple[str, PreTrainedModel]) -> None:
    backend, model = pair
    if model.config.model_type == "whisper":
        pytest.skip("Whisper's generate starts each segment anew")
    cache = kt.create_cache(model, backend, max_length=64)
    answered = generate(model, target(4), **{CACHE_ARGUMENT: cache})
    more = torch.cat([answered, target(3, seed=5)], dim=1)
    # Without the mask, generate takes all of it for new.
    got = generate(model, more, decoder_attention_mask=torch.ones_like(more), **{CACHE_ARGUMENT: cache})
    assert torch.equal(got, generate(model, more, use_cache=False))


def test_reset_then_another_source(pair: tuple[str, PreTrainedModel]) -> None:
    backend, model = pair
    cache = kt.create_cache(model, backend, max_length=64)
    fed(model, target(5, batch=2), (5,), cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert not any(cache.is_updated.values())
    ids = target(7, seed=9)
    torch.testing.assert_close(fed(model, ids, (6, 1), cache), without_cache(model, ids), rtol=1e-3, atol=1e-3)


def test_prompt_lookup_rolls_the_decoder_back(pair: tuple[str, PreTrainedModel]) -> None:
    backend, model = pair
    if backend == "static" and not versions.RECORDS_STATES:
        pytest.skip("early transformers refuses assisted decoding for the name static")
    ids = target(4).repeat(1, 3)
    expected = generate(model, ids, use_cache=False, max_new_tokens=12)
    got = generate(model, ids, cache_implementation=backend, prompt_lookup_num_tokens=3, max_new_tokens=12)
    assert torch.equal(got[:, : expected.shape[1]], expected)


# --- two backends, copies, files ------------------------------------------------------------------


def test_each_side_by_its_own_backend(models, tmp_path: Path) -> None:
    model, ids = models("bart"), target(9, batch=2)
    last = exact_backends()[-1]
    config = {"self_attention": last, "cross_attention": "dynamic"}
    cache = kt.create_cache(model, "encoder-decoder", max_length=64, **config)
    expected = without_cache(model, ids)
    fed(model, ids[:, :6], (6,), cache)
    cache.save(tmp_path / "cache.safetensors")
    loaded = kt.wrap(kvrack.load(tmp_path / "cache.safetensors"))
    assert isinstance(loaded, kt.TransformersEncoderDecoderCache)
    for each in (copy.deepcopy(cache), loaded, cache):
        got = fed(model, ids[:, 6:], (1, 2), each)
        torch.testing.assert_close(got, expected[:, 6:], rtol=1e-3, atol=1e-3)
    settings = {"cache_implementation": "encoder-decoder", "cache_config": config}
    assert torch.equal(generate(model, target(4), **settings), generate(model, target(4), use_cache=False))
    assert config == {"self_attention": last, "cross_attention": "dynamic"}


@pytest.mark.parametrize("backend", LOSSY)
def test_codecs_encode_both_sides(models, backend: str) -> None:
    model, ids = models("bart"), target(12)
    settings = {"residual_length": 1} if "residual_length" in type(kvrack.resolve(backend).config).model_fields else {}
    cache = kt.create_cache(model, backend, max_length=64, **settings)
    expected = without_cache(model, ids)
    error = fed(model, ids, (6, 3, 1, 1, 1), cache) - expected
    assert error[:, :6].abs().max() < 1e-3, "the first step attends exactly"
    assert 0 < error.std() < 0.5 * expected.std()
    generate(model, target(4), cache_implementation=backend, cache_config=settings)


@pytest.mark.skipif("static" not in exact_backends(), reason="kvrack-static is not installed")
def test_a_compiled_decoder_step_equals_the_eager_one(models) -> None:
    model, ids = models("bart"), target(4 + STEPS)
    given = source(model)
    with torch.no_grad():
        encoded = model.get_encoder()(**given)
        logits = []
        for step in (model, torch.compile(model, backend="eager")):
            cache = kt.create_cache(model, "static", max_length=64)
            shared = {"encoder_outputs": encoded, "attention_mask": given["attention_mask"], CACHE_ARGUMENT: cache}
            model(decoder_input_ids=ids[:, :4], **shared)
            logits.append([step(decoder_input_ids=ids[:, i : i + 1], **shared).logits for i in range(4, 4 + STEPS)])
    torch.testing.assert_close(torch.cat(logits[1]), torch.cat(logits[0]), rtol=1e-4, atol=1e-4)
