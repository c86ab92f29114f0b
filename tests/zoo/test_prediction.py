"""What `kt.model_spec` reads from a config is what a model of that family caches, to the byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import kvrack
import kvrack_transformers as kt
from kvrack.registry import installed
from kvrack_transformers.reading import LATENT
from kvrack_transformers.state_shapes import FAMILIES
from kvrack_transformers.versions import READS_STATES_FROM_LAYERS, cache_argument

sys.path.insert(0, str(Path(__file__).parent))
from tiny_encoder_decoders import ENCODER_DECODERS
from tiny_families import LATENT_ATTENTION, STATES

OWN_CACHE = ("olmo_hybrid",)
"""Families that take no cache but their own until models ask any cache for their states."""

CONFIGS = {**LATENT_ATTENTION, **STATES}
TOKENS = 40


def _model(family: str) -> PreTrainedModel:
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family in OWN_CACHE and READS_STATES_FROM_LAYERS:
        pytest.skip(f"{family} of transformers {transformers.__version__} takes no cache but its own")
    config = AutoConfig.for_model(family, **CONFIGS[family])
    if family == "mistral4":
        # It is the text part of a model that sees, and has no class for text alone.
        return transformers.Mistral4ForCausalLM(config)
    return AutoModelForCausalLM.from_config(config)


def _feed(model: PreTrainedModel, cache: kvrack.Cache, **given: torch.Tensor) -> None:
    ids = torch.randint(2, 60, (2, TOKENS))
    name = "decoder_input_ids" if given else "input_ids"
    with torch.no_grad():
        for piece in ids.split([TOKENS - 1, 1], dim=1):
            model(**{name: piece, cache_argument(model): cache, "use_cache": True}, **given)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_caches_what_is_read_from_its_config(family: str) -> None:
    if family in STATES and "mamba" not in installed():
        pytest.skip("kvrack-mamba is not installed")
    model = _model(family).to(torch.bfloat16).eval()
    spec = kt.model_spec(model.config)
    cache = kt.create_cache(model, "dynamic", max_length=TOKENS)
    _feed(model, cache)
    predicted = kvrack.predict_memory("dynamic", spec, TOKENS, 2, torch.bfloat16)
    assert predicted.unknown == ()
    held = [(row.layer, row.role, row.nbytes) for row in cache.memory()]
    assert [(row.layer, row.role, row.nbytes) for row in predicted.rows] == held


@pytest.mark.skipif("encoder-decoder" not in installed(), reason="kvrack-encoder-decoder is not installed")
@pytest.mark.parametrize("name", ["t5", "bart", "t5gemma"])
def test_an_encoders_output_is_counted_by_its_own_length(name: str) -> None:
    model = ENCODER_DECODERS[name]().eval()
    cache = kt.create_cache(model, "dynamic", max_length=TOKENS)
    _feed(model, cache, input_ids=torch.randint(2, 60, (2, 60)))
    predicted = kvrack.predict_memory("dynamic", kt.model_spec(model.config), TOKENS, 2, encoder_tokens=60)
    assert predicted.unknown == ()
    assert predicted.nbytes == cache.nbytes


def test_every_family_that_is_known_is_here() -> None:
    assert set(LATENT_ATTENTION) == LATENT
    assert set(FAMILIES) <= set(CONFIGS)
