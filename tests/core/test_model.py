"""What a model needs remembered: the checks of its specs, and their way to plain data and back."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from kvrack import LayerSpec, ModelSpec, StateShape


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"attention": "cross"}, "LayerSpec.attention: expected one of full, sliding, chunked or None, got 'cross'"),
        ({"attention": "sliding"}, "LayerSpec.window: a sliding layer needs a window of 1 or more, got None"),
        ({"attention": "chunked", "window": 0}, "LayerSpec.window: a chunked layer needs a window of 1 or more, got 0"),
        ({"window": 6}, "LayerSpec.window: only sliding and chunked layers have one, got 6"),
        (
            {"attention": None, "window": 6},
            "LayerSpec.window: only sliding and chunked layers have one, got 6",
        ),
        ({"states": -1}, "LayerSpec.states: expected 0 or more, got -1"),
        *(
            (fields, "LayerSpec.cross_attention: such a layer attends to all of the encoder's output, no more")
            for fields in (
                {"cross_attention": True, "attention": "sliding", "window": 6},
                {"cross_attention": True, "attention": None},
                {"cross_attention": True, "states": 1},
            )
        ),
    ],
)
def test_a_layer_spec_that_makes_no_sense_is_refused(fields, text):
    with pytest.raises(ValueError, match="LayerSpec") as caught:
        LayerSpec(**fields)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("spec", "nothing"),
    [
        (LayerSpec(), False),
        (LayerSpec(attention="sliding", window=1), False),
        (LayerSpec(attention=None), True),
        (LayerSpec(attention=None, states=1), False),
        (LayerSpec(states=1), False),
    ],
)
def test_a_layer_holds_nothing_without_attention_and_states(spec, nothing):
    assert spec.holds_nothing is nothing


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="ModelSpec: no layers"):
        ModelSpec()


def test_specs_are_frozen():
    with pytest.raises(FrozenInstanceError):
        LayerSpec().window = 3
    with pytest.raises(FrozenInstanceError):
        ModelSpec.uniform(1).name = "other"


def test_uniform():
    sliding = LayerSpec(attention="sliding", window=6)
    assert ModelSpec.uniform(2) == ModelSpec(layers=(LayerSpec(), LayerSpec()))
    assert ModelSpec.uniform(3, sliding).layers == (sliding, sliding, sliding)


def test_a_model_with_cross_attention_layers_is_an_encoder_decoder():
    assert not ModelSpec.uniform(1).is_encoder_decoder
    spec = ModelSpec(layers=(LayerSpec(),), cross_layers=(LayerSpec(),))
    assert spec.is_encoder_decoder
    assert [layer.cross_attention for layer in (*spec.layers, *spec.cross_layers)] == [False, True]
    with pytest.raises(ValueError, match="layers on demand next to cross-attention layers"):
        ModelSpec(further=LayerSpec(), cross_layers=(LayerSpec(),))


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec.uniform(2),
        ModelSpec(further=LayerSpec(kv_heads=2)),
        ModelSpec(
            layers=(
                LayerSpec(kv_heads=3, key_head_dim=24, value_head_dim=16),
                LayerSpec(attention="chunked", window=8, read_by_others=True),
                LayerSpec(attention=None, states=2),
                LayerSpec(states=1, state_shapes=(StateShape((40, 4), (2, 8, 16), "float32"),)),
                LayerSpec(attention=None, states=2, state_shapes=(StateShape((40, 4)), StateShape(recurrent=(8,)))),
                LayerSpec(attention=None),
            ),
            cross_layers=(LayerSpec(),),
            max_length=2048,
            name="tiny",
        ),
    ],
)
def test_a_spec_comes_back_equal_from_plain_data(spec):
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("data", "error"),
    [
        ({}, ValueError),
        ({"layers": [{"attention": "cross"}]}, ValueError),
        ({"layers": [{"banana": 1}]}, TypeError),
        ({"layers": [{}], "banana": 1}, TypeError),
        ({"layers": 3}, TypeError),
    ],
)
def test_data_that_is_no_spec_is_refused(data, error):
    with pytest.raises(error):
        ModelSpec.from_dict(data)
