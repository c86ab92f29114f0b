"""A transformers config -> kvrack's ModelSpec."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvrack import KvrackError, LayerSpec, ModelSpec, StateShape
from kvrack.model import AttentionKind
from kvrack_transformers.sharding import per_rank, shard_of
from kvrack_transformers.state_shapes import state_shape

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

FULL = {"full_attention", "attention"}
SLIDING = {"sliding_attention"}
CHUNKED = {"chunked_attention"}
STATES = {"linear_attention", "conv", "mamba"}
HYBRID = {"hybrid"}
HYBRID_SLIDING = {"hybrid_sliding"}
NOTHING = {"moe", "mlp", "dummy"}
LATENT = {
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
    "longcat_flash",
    "minicpm3",
    "mistral4",
    "sarvam_mla",
    "youtu",
}
"""Families with multi-head latent attention of which what they cache was compared with what is read here."""

KNOWN = FULL | SLIDING | CHUNKED | STATES | HYBRID | HYBRID_SLIDING | NOTHING


class UnknownLayerType(KvrackError, ValueError):
    """A model has a kind of layer whose memory kvrack doesn't know how to keep."""

    def __init__(self, layer_type: str, index: int, model: str) -> None:
        self.layer_type = layer_type
        super().__init__(
            f"layer {index} of {model} is of type {layer_type!r}, which kvrack doesn't know. "
            f"Known types: {', '.join(sorted(KNOWN))}"
        )


def model_spec(model_or_config: PreTrainedModel | PreTrainedConfig) -> ModelSpec:
    """Return what a model needs remembered, read from its config, and what of it this rank holds.

    Args:
        model_or_config: a model, or a config; of a composite one the text decoder's part is read.
            Of a model that tensor parallelism split, the spec is of this rank's heads.

    Raises UnknownLayerType for a layer type that has no meaning in kvrack, ValueError for a config
    that contradicts itself.
    """
    config: Any = getattr(model_or_config, "config", model_or_config)
    decoder = config.get_text_config(decoder=True)
    name = type(model_or_config).__name__ if config is not model_or_config else str(config.model_type)
    per_layer = _per_layer_configs(decoder, _layer_count(config, decoder))
    layers = tuple(
        _layer_spec(layer_type, per_layer[index], index, name, sharing)
        for index, (layer_type, sharing) in enumerate(
            zip(_layer_types(decoder, per_layer), _sharing(decoder, len(per_layer)), strict=True)
        )
    )
    cross: tuple[LayerSpec, ...] = ()
    if getattr(config, "is_encoder_decoder", False):
        cross = tuple(_attention_spec("full", None, layer) for layer in per_layer)
    shard = shard_of(model_or_config)
    return ModelSpec(
        layers=tuple(per_rank(layer, model_or_config, shard) for layer in layers),
        cross_layers=tuple(per_rank(layer, model_or_config, shard) for layer in cross),
        max_length=longest_sequence(decoder),
        name=name,
        shard=shard,
    )


def longest_sequence(config: PreTrainedConfig) -> int | None:
    """Return how many positions a decoder's config names, None where it names none."""
    # Whisper and its kin name the decoder's positions by the second.
    return getattr(config, "max_position_embeddings", None) or getattr(config, "max_target_positions", None)


def room_for_answer(model: PreTrainedModel, given: int, asked: int, capacity: int = -1) -> int:
    """Return how many new tokens there are positions for after `given` ones, at most `asked`.

    Args:
        model: the model.
        given: tokens of the prompt.
        asked: tokens of the longest answer wanted.
        capacity: tokens that the cache takes, -1 for any number.

    Raises KvrackError where the prompt alone is as long as the model or the cache takes.
    """
    longest = longest_sequence(model.config.get_text_config())
    limits = [("the model takes", longest)] if longest is not None else []
    limits += [("the cache takes", capacity)] if capacity >= 0 else []
    for what, limit in limits:
        if given >= limit:
            raise KvrackError(f"the prompt is {given} tokens long, {what} {limit} with its answer")
        asked = min(asked, limit - given)
    return asked


def _layer_count(config: Any, decoder: PreTrainedConfig) -> int:
    # T5 and its kin count decoder layers apart, under a name that get_text_config passes over.
    own = getattr(config, "num_decoder_layers", None) if getattr(config, "is_encoder_decoder", False) else None
    return own if isinstance(own, int) else decoder.num_hidden_layers


def _per_layer_configs(decoder: PreTrainedConfig, count: int) -> list[Any]:
    # Releases before heterogeneous configs have one config for all layers.
    per_layer = getattr(decoder, "per_layer_config", None)
    return list(per_layer) if per_layer is not None and len(per_layer) == count else [decoder] * count


def _layer_types(decoder: PreTrainedConfig, per_layer: list[Any]) -> list[str]:
    declared = getattr(decoder, "layer_types", None)
    if declared is not None:
        return list(declared)
    inferred = []
    for layer in per_layer:
        if getattr(layer, "sliding_window", None) is not None:
            inferred.append("sliding_attention")
        elif getattr(layer, "attention_chunk_size", None) is not None:
            inferred.append("chunked_attention")
        else:
            inferred.append("full_attention")
    return inferred


def _sharing(decoder: PreTrainedConfig, count: int) -> list[str | None]:
    """Return for each layer "store" if others read its keys and values, "reuse" if it reads others', else None."""
    modes = getattr(decoder, "kv_sharing_modes", None)
    if modes is not None:
        return list(modes)
    # Before that property (Gemma3n in transformers 5.6): the last n layers reuse what earlier ones
    # of their type keep. Which ones is not said, so all that keep may be read.
    shared = getattr(decoder, "num_kv_shared_layers", None) or 0
    return ["store" if shared else None] * (count - shared) + ["reuse"] * shared


def _layer_spec(layer_type: str, layer: Any, index: int, model: str, sharing: str | None) -> LayerSpec:
    if layer_type not in KNOWN or sharing not in (None, "store", "reuse"):
        raise UnknownLayerType(layer_type if layer_type not in KNOWN else f"KV sharing {sharing}", index, model)
    if layer_type in NOTHING or sharing == "reuse":
        return LayerSpec(attention=None)
    states = getattr(layer, "number_of_conv_states", 1) if layer_type in STATES | HYBRID | HYBRID_SLIDING else 0
    shapes = _state_shapes(layer, states)
    if layer_type in STATES:
        return LayerSpec(attention=None, states=states, state_shapes=shapes)
    if layer_type in SLIDING | HYBRID_SLIDING:
        spec = _attention_spec("sliding", _window(layer, "sliding_window", layer_type, index, model), layer)
    elif layer_type in CHUNKED:
        spec = _attention_spec("chunked", _window(layer, "attention_chunk_size", layer_type, index, model), layer)
    else:
        spec = _attention_spec("full", None, layer)
    return replace(spec, states=states, state_shapes=shapes, read_by_others=sharing == "store")


def _state_shapes(layer: Any, states: int) -> tuple[StateShape, ...]:
    # No family that is known has several.
    shape = state_shape(layer) if states == 1 else None
    return () if shape is None else (shape,)


def _window(layer: Any, key: str, layer_type: str, index: int, model: str) -> int:
    window = getattr(layer, key, None)
    if not isinstance(window, int) or window < 1:
        raise ValueError(f"layer {index} of {model} is of type {layer_type!r}, but config.{key} is {window!r}")
    return window


def _attention_spec(attention: AttentionKind, window: int | None, layer: Any) -> LayerSpec:
    heads = _int_or_none(getattr(layer, "num_attention_heads", None))
    if getattr(layer, "kv_lora_rank", None):
        return LayerSpec(attention, window, *_latent(layer, heads))
    head_dim = getattr(layer, "head_dim", None)
    if head_dim is None and heads and getattr(layer, "hidden_size", None):
        head_dim = layer.hidden_size // heads
    return LayerSpec(
        attention,
        window,
        kv_heads=_int_or_none(getattr(layer, "num_key_value_heads", None) or heads),
        key_head_dim=_int_or_none(head_dim),
        value_head_dim=_int_or_none(getattr(layer, "v_head_dim", None) or head_dim),
    )


def _latent(layer: Any, heads: int | None) -> tuple[int | None, int | None, int | None]:
    """Return heads and head_dims of what multi-head latent attention caches (DeepSeek-AI 2024, "DeepSeek-V2")."""
    if layer.model_type not in LATENT:
        return None, None, None
    from kvrack_transformers.versions import caches_latents

    if caches_latents():
        # One head: the latent in place of keys, the rotary part of the keys in place of values.
        return 1, layer.kv_lora_rank, layer.qk_rope_head_dim
    return heads, layer.qk_nope_head_dim + layer.qk_rope_head_dim, layer.v_head_dim


def _int_or_none(value: Any) -> int | None:
    return value if isinstance(value, int) else None
