"""Cross-attention layers: an encoder's output, given once and read at every later step."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import kvrack
from kvrack.layer import AttentionLayer
from kvrack.model import LayerSpec
from kvrack_spec.compare import expect_close, tolerance
from kvrack_spec.expect import broken, expect, expect_equal
from kvrack_spec.subject import Shape, Subject, layer_spec

ENCODED = 11
LONG = 300


@pytest.fixture(params=["full", "sliding"])
def cache(request: pytest.FixtureRequest, subject: Subject) -> kvrack.Cache:
    """A cache of one decoder layer, with and without a window, beside one of cross-attention; the check is not
    run where the backend leaves that to a companion."""
    if not kvrack.resolve(subject.name, subject.settings).backend.cross_attention:
        pytest.skip("the backend keeps no cross-attention")
    if not subject.serves(request.param):
        pytest.skip(f"{request.param} layers are declined")
    return subject.cache(layer_spec(request.param), cross_layers=(LayerSpec(),), max_length=16)


def _cross(cache: kvrack.Cache) -> AttentionLayer:
    layer = cache.cross_attention.layers[0]
    assert isinstance(layer, AttentionLayer), f"{type(layer).__name__} is not an AttentionLayer"
    return layer


def _read(cache: kvrack.Cache) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = _cross(cache).keys, _cross(cache).values
    if keys is None or values is None:
        broken("keys and values of a filled cross-attention layer", None)
    return keys.clone(), values.clone()


def _fill(subject: Subject, cache: kvrack.Cache, tokens: int = ENCODED) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill both sides; return what cross-attention holds afterwards."""
    cache.self_attention.update(*subject.states(9), 0)
    cache.cross_attention.update(*subject.states(tokens, seed=3), 0)
    return _read(cache)


def _expect_read(cache: kvrack.Cache, wanted: tuple[torch.Tensor, torch.Tensor], what: str) -> None:
    for seen, expected in zip(_read(cache), wanted, strict=True):
        expect_close(seen, expected, 0.0, what)


@pytest.mark.rule("X1", "X2")
@pytest.mark.parametrize("tokens", [1, ENCODED, LONG])
def test_every_token_is_returned_and_stays_readable(subject: Subject, cache: kvrack.Cache, tokens: int) -> None:
    given = subject.states(tokens, seed=3)
    returned = cache.cross_attention.update(*given, 0)
    layer = _cross(cache)
    allowed = tolerance(layer, given[0].dtype)
    for what, seen, expected in zip(("keys", "values"), returned, given, strict=True):
        expect_close(seen, expected, allowed, f"returned {what}")
    expect_equal(layer.get_seq_length(), tokens, "tokens of cross-attention")
    first = _read(cache)
    for what, seen, expected in zip(("keys", "values"), first, given, strict=True):
        expect_close(seen, expected, allowed, f"{what} read after the update")
    for step in range(3):
        cache.self_attention.update(*subject.states(1, seed=step), 0)
        _expect_read(cache, first, f"cross-attention read at step {step}")
    expect_equal(cache.get_seq_length(), 3, "the decoder's length")


@pytest.mark.rule("X3")
def test_what_moves_the_decoder_leaves_the_encoders_output(subject: Subject, cache: kvrack.Cache) -> None:
    cache.activate_past_recording()
    wanted = _fill(subject, cache)
    expect(_cross(cache).is_croppable, "cross-attention that stands in no crop's way", "is_croppable False")
    for tokens in (-1, -99, 0):
        if not subject.capabilities().crops:
            break
        cache.crop(tokens)
        _expect_read(cache, wanted, f"cross-attention after crop({tokens})")
    expect_equal(_cross(cache).get_seq_length(), ENCODED, "tokens of cross-attention after crops")


@pytest.mark.rule("X3")
@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_the_encoders_output_follows_the_decoder(
    subject: Subject, cache: kvrack.Cache, way: str, tmp_path: Path
) -> None:
    keys, values = _fill(subject, cache)
    if way == "deepcopy":
        other = copy.deepcopy(cache)
    else:
        cache.save(tmp_path / "cache.safetensors")
        other = kvrack.load(tmp_path / "cache.safetensors", subject.device)
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 0, 1, 2, 3, 4], device=subject.device))
    cache.batch_select_indices(torch.tensor([0, 3], device=subject.device))
    rows = torch.tensor([2, 1], device=subject.device)
    _expect_read(cache, (keys[rows], values[rows]), "cross-attention after batch operations")
    _expect_read(other, (keys, values), f"cross-attention of a {way}, after batch operations on the original")
    cache.reset()
    expect_equal(_cross(cache).get_seq_length(), 0, "tokens of cross-attention after reset()")
    cache.cross_attention.update(*subject.states(3, Shape(batch=2), seed=8), 0)
    expect_equal(_read(cache)[0].shape[:3], (2, 2, 3), "cross-attention filled again after reset(), of shape")


@pytest.mark.rule("X4")
def test_a_second_output_is_refused(subject: Subject, cache: kvrack.Cache) -> None:
    wanted = _fill(subject, cache)
    try:
        cache.cross_attention.update(*subject.states(ENCODED, seed=4), 0)
    except kvrack.UnsupportedOperation as error:
        expect("reset" in error.remedy, "a remedy that names reset()", error.remedy)
    else:
        broken("a second update of cross-attention to be refused", "it was taken")
    _expect_read(cache, wanted, "cross-attention after a refused update")
