"""Models that keep states give with a kvrack cache what they give without any, whatever attends beside them.

Where transformers itself is wrong about a model, its own cache is the measure, and the reason stands beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING

import kvrack
import kvrack_transformers as kt
from kvrack.config import QUANTIZED_BACKENDS
from kvrack.registry import installed
from kvrack_transformers import versions
from kvrack_transformers.versions import PURE_STATE_ARGUMENT, cache_argument

sys.path.insert(0, str(Path(__file__).parent))
from conftest import exact_backends, lossy_backends
from tiny_states import STATES

pytestmark = pytest.mark.skipif("mamba" not in installed(), reason="kvrack-mamba is not installed")

PURE = ("mamba", "mamba2")
IGNORES_PAST = ("mamba",)
"""Models whose forward over several tokens starts from an empty recurrent state whatever the cache holds."""

STEPS = 6
BOTH = ("qwen3_next", "falcon_h1")
SPEC = kvrack.ModelSpec.uniform(1)
# The same state layers serve beside every backend, so a second exact one is shown to the models that attend alone.
OTHERS = [name for name in exact_backends() if name != "dynamic"]
if "linear_attention" not in LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING:
    # Early transformers has no masks for models with states and a cache that may return unused slots.
    OTHERS = [name for name in OTHERS if not kvrack.create_cache(name, SPEC, max_length=8).is_compileable]
PAIRS = [("dynamic", name) for name in STATES] + [(backend, name) for backend in OTHERS for name in BOTH]
LOSSY = lossy_backends()


@pytest.fixture(params=PAIRS, ids="-".join)
def pair(request: pytest.FixtureRequest, models) -> tuple[str, PreTrainedModel]:
    """Each exact backend beside models with states."""
    backend, name = request.param
    return backend, models(name)


@pytest.fixture(params=sorted(STATES))
def model(request: pytest.FixtureRequest, models) -> PreTrainedModel:
    """Each model with states in turn."""
    return models(request.param)


def kind(model: PreTrainedModel) -> str:
    return model.config.model_type


def prompt(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 64, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(model: PreTrainedModel, ids: torch.Tensor, **settings) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": STEPS, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, **settings)


def new_cache(model: PreTrainedModel, backend: str, **config):
    return kt.create_cache(model, backend, max_length=64, **config)


def fed(model: PreTrainedModel, ids: torch.Tensor, pieces: tuple[int, ...], cache) -> torch.Tensor:
    """Return the logits of a sequence fed in pieces to a model with this cache."""
    seen, past = [], 0
    for piece in ids.split(pieces, dim=1):
        given = {cache_argument(model): cache}
        if kind(model) not in PURE:
            # Bamba takes 0 for the first position of whatever it is given without them.
            given["position_ids"] = torch.arange(past, past + piece.shape[1])[None].expand_as(piece)
        with torch.no_grad():
            seen.append(model(piece, use_cache=True, **given).logits)
        past += piece.shape[1]
    return torch.cat(seen, dim=1)


def held(cache) -> dict[str, torch.Tensor]:
    """Return copies of all that a cache holds."""
    return {f"{i}.{name}": each.clone() for i, layer in enumerate(cache.rack) for name, each in layer.storage().items()}


def transformers_own(model: PreTrainedModel):
    return transformers.DynamicCache(config=model.config)


# --- equal to no cache ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [2, 9])
def test_a_prompt_and_single_tokens(pair: tuple[str, PreTrainedModel], length: int) -> None:
    backend, model = pair
    ids = prompt(length + STEPS, batch=2)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    assert expected.std() > 0.5, "logits too flat to tell a right cache from a wrong one"
    got = fed(model, ids, (length, *[1] * STEPS), new_cache(model, backend))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("pieces", [(5, 4), (1, 2, 6)])
def test_a_sequence_fed_in_pieces(pair: tuple[str, PreTrainedModel], pieces: tuple[int, ...]) -> None:
    """field-faults 7."""
    backend, model = pair
    if versions.READS_STATES_FROM_LAYERS:
        pytest.skip("not every model of transformers before 5.21 takes several tokens on a filled cache")
    ids = prompt(9, batch=2)
    if kind(model) in IGNORES_PAST:
        expected = fed(model, ids, pieces, transformers_own(model))
    else:
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
    got = fed(model, ids, pieces, new_cache(model, backend))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("beams", [1, 3])
def test_greedy_and_beams(pair: tuple[str, PreTrainedModel], beams: int) -> None:
    """field-faults 8."""
    backend, model = pair
    if beams > 1 and cache_argument(model) == PURE_STATE_ARGUMENT and not versions.RETURNS_WHOLE_CONV_STATE:
        pytest.skip("transformers before 5.14 doesn't reorder what it passes as cache_params")
    settings = {"num_beams": beams, "num_return_sequences": beams}
    expected = generate(model, prompt(9), use_cache=False, **settings)
    assert torch.equal(generate(model, prompt(9), cache_implementation=backend, **settings), expected)


def test_a_left_padded_batch_equals_each_row_alone(pair: tuple[str, PreTrainedModel]) -> None:
    backend, model = pair
    rows = [prompt(5, seed=2), prompt(9, seed=3)]
    padded, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    for index, row in enumerate(rows):
        padded[index, 9 - row.shape[1] :] = row
        mask[index, 9 - row.shape[1] :] = 1
    together = generate(model, padded, attention_mask=mask, cache_implementation=backend)[:, 9:]
    for index, row in enumerate(rows):
        assert torch.equal(together[index], generate(model, row, cache_implementation=backend)[0, row.shape[1] :])


def test_two_chat_turns_on_one_cache(pair: tuple[str, PreTrainedModel]) -> None:
    backend, model = pair
    if kind(model) in IGNORES_PAST or not versions.RETURNS_WHOLE_CONV_STATE:
        pytest.skip("transformers forgets the state when it is given several tokens more")
    first, second = prompt(9, seed=4), prompt(5, seed=5)
    cache = new_cache(model, backend)
    argument = cache_argument(model)
    answered = generate(model, first, **{argument: cache})
    conversation = torch.cat([answered, second], dim=1)
    # States don't say how many tokens they have seen, so without attention only what is new may be given.
    given = conversation[:, first.shape[1] + STEPS - 1 :] if kind(model) in PURE else conversation
    got = generate(model, given, **{argument: cache})
    expected = generate(model, conversation, use_cache=False)
    assert torch.equal(got[:, -STEPS:], expected[:, -STEPS:])


# --- going back -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["prompt lookup", "assistant"])
@pytest.mark.parametrize("backend", exact_backends())
def test_assisted_decoding_where_states_roll_back(models, backend: str, how: str) -> None:
    model = models("lfm2")
    ids, settings = prompt(5).repeat(1, 3), {"max_new_tokens": 12, "eos_token_id": 1}
    helper = {"prompt_lookup_num_tokens": 3} if how == "prompt lookup" else {"assistant_model": models("llama")}
    if not versions.RECORDS_STATES:
        with pytest.raises((kvrack.UnsupportedOperation, ValueError)):
            generate(model, ids, cache_implementation=backend, **helper, **settings)
        return
    expected = generate(model, ids, use_cache=False, **settings)
    assert torch.equal(generate(model, ids, cache_implementation=backend, **helper, **settings), expected)


@pytest.mark.skipif(not versions.RECORDS_STATES, reason="transformers before 5.21 hides what happens to states")
def test_whole_forwards_can_be_taken_back(model: PreTrainedModel) -> None:
    ids = prompt(10, batch=2)
    cache = new_cache(model, "dynamic")
    cache.activate_past_recording()
    fed(model, ids[:, :9], (9,), cache)
    before = held(cache)
    given = {} if kind(model) in PURE else {"position_ids": torch.full((2, 1), 9)}
    answers = []
    for _ in range(2):
        with torch.no_grad():
            answers.append(model(ids[:, 9:], use_cache=True, **given, **{cache_argument(model): cache}).logits)
        assert cache.is_croppable
        cache.crop(-1)
        for name, tensor in held(cache).items():
            assert torch.equal(tensor, before[name]), name
    assert torch.equal(*answers)


def test_a_crop_that_states_refuse_changes_nothing(model: PreTrainedModel) -> None:
    """field-faults 5 and 6."""
    cache = new_cache(model, "dynamic")
    cache.crop(-3)
    assert cache.get_seq_length() == 0
    fed(model, prompt(9), (9,), cache)
    before = held(cache)
    for tokens in (-3, -99):
        with pytest.raises(kvrack.UnsupportedOperation):
            cache.crop(tokens)
        after = held(cache)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in before)


# --- beside lossy attention -----------------------------------------------------------------------


@pytest.mark.parametrize("backend", LOSSY)
@pytest.mark.parametrize("name", BOTH)
def test_codecs_encode_what_attends_and_nothing_else(models, backend: str, name: str) -> None:
    """field-faults 33."""
    model, ids = models(name), prompt(9 + STEPS)
    settings = {"residual_length": 1} if "residual_length" in type(kvrack.resolve(backend).config).model_fields else {}
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
    cache = new_cache(model, backend, **settings)
    error = fed(model, ids, (9, *[1] * STEPS), cache) - expected
    assert error[:, :9].abs().max() < 1e-3, "a prompt attends to itself exactly"
    assert error.std() < 0.5 * expected.std()
    states = [
        (name, tensor) for layer in cache.rack for name, tensor in layer.storage().items() if name.startswith("states.")
    ]
    assert len(states) == sum(spec.states > 0 for spec in cache.rack.model_spec.layers) * 2
    assert all(tensor.is_floating_point() for _, tensor in states)
    named = generate(model, ids, cache_implementation=backend, cache_config=settings)
    if backend in QUANTIZED_BACKENDS:
        config = {"backend": backend, **settings}
        assert torch.equal(generate(model, ids, cache_implementation="quantized", cache_config=config), named)


# --- early initialization and compile -------------------------------------------------------------


def test_early_initialization_leaves_linear_layers_their_shapes(models) -> None:
    """field-faults 28."""
    model, ids = models("qwen3_next"), prompt(9)
    cache = new_cache(model, "dynamic")
    cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(fed(model, ids, (9,), cache), model(ids, use_cache=False).logits)


def state_addresses(cache) -> list[int]:
    return [
        tensor.data_ptr()
        for layer in cache.rack
        for name, tensor in layer.storage().items()
        if name.startswith("states.")
    ]


@pytest.mark.skipif(versions.READS_STATES_FROM_LAYERS, reason="models of transformers before 5.21 break the graph")
@pytest.mark.parametrize("name", ["mamba", "falcon_h1"])
def test_a_compiled_step_equals_the_eager_one(models, name: str) -> None:
    model, ids = models(name), prompt(9 + STEPS)
    argument = cache_argument(model)
    backend = "static" if "static" in exact_backends() and name not in PURE else "dynamic"
    caches = [new_cache(model, backend) for _ in range(2)]
    steps = [model, torch.compile(model, backend="eager", fullgraph=True)]
    logits: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for seen, step, cache in zip(logits, steps, caches, strict=True):
            model(ids[:, :9], use_cache=True, **{argument: cache})
            addresses = state_addresses(cache)
            for index in range(9, 9 + STEPS):
                seen.append(step(ids[:, index : index + 1], use_cache=True, **{argument: cache}).logits)
            assert state_addresses(cache) == addresses
    torch.testing.assert_close(torch.cat(logits[1]), torch.cat(logits[0]), rtol=1e-4, atol=1e-4)
