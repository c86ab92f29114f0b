"""model_spec: what a transformers config says a model must remember."""

import pytest
import transformers

import kvrack_transformers as kt
from kvrack import LayerSpec, UnsupportedOperation
from kvrack_transformers.versions import caches_latents

SMALL = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def kinds(config):
    return [(layer.attention, layer.window, layer.states) for layer in kt.model_spec(config).layers]


def test_full_attention_with_grouped_heads():
    spec = kt.model_spec(transformers.LlamaConfig(**SMALL, max_position_embeddings=99))
    assert spec.layers == (LayerSpec(kv_heads=2, key_head_dim=16, value_head_dim=16),) * 4
    assert (spec.max_length, spec.name, spec.is_encoder_decoder) == (99, "llama", False)


def test_sliding_without_layer_types():
    assert kinds(transformers.MistralConfig(**SMALL, sliding_window=6)) == [("sliding", 6, 0)] * 4


def test_mixed_layer_types():
    config = transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=6)
    assert kinds(config) == [("sliding", 6, 0), ("full", None, 0)] * 2


def test_chunked_and_full():
    config = transformers.Llama4TextConfig(
        **SMALL, head_dim=16, attention_chunk_size=6, num_local_experts=2, moe_layers=[]
    )
    assert kinds(config) == [("chunked", 6, 0)] * 3 + [("full", None, 0)]


def test_composite_config_is_read_at_its_decoder():
    text = transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=6).to_dict()
    text.pop("model_type")
    config = transformers.PaliGemmaConfig(text_config={"model_type": "gemma2", **text})
    assert kinds(config) == [("sliding", 6, 0), ("full", None, 0)] * 2


def test_kv_sharing_layers_hold_nothing_and_their_source_is_read():
    config = transformers.Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 6},
        head_dim=16,
        sliding_window=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=3,
        activation_sparsity_pattern=[0.0] * 6,
    )
    layers = kt.model_spec(config).layers
    assert [layer.holds_nothing for layer in layers] == [False] * 3 + [True] * 3
    assert layers[1].read_by_others
    assert layers[2].read_by_others


class OtherLatentConfig(transformers.DeepseekV3Config):
    model_type = "other_latent"


def test_latent_attention_of_an_unknown_family_leaves_the_shapes_to_the_first_update():
    shapes = {"kv_lora_rank": 24, "qk_nope_head_dim": 14, "qk_rope_head_dim": 8, "v_head_dim": 20}
    known = kt.model_spec(transformers.DeepseekV3Config(**{**SMALL, "num_key_value_heads": 4}, **shapes)).layers[0]
    other = kt.model_spec(OtherLatentConfig(**{**SMALL, "num_key_value_heads": 4}, **shapes)).layers[0]
    expected = (1, 24, 8) if caches_latents() else (4, 22, 20)
    assert (known.kv_heads, known.key_head_dim, known.value_head_dim) == expected
    assert other == LayerSpec()


@pytest.fixture
def without_companions(monkeypatch):
    """As where neither kvrack-mamba nor kvrack-encoder-decoder is installed."""
    monkeypatch.setattr("kvrack.companions.installed", lambda: {"dynamic": ()})


@pytest.mark.usefixtures("without_companions")
def test_linear_attention_is_named_and_refused_with_the_pip_line():
    config = transformers.Qwen3NextConfig(**SMALL, layer_types=["linear_attention", "full_attention"] * 2)
    assert kinds(config) == [(None, None, 1), ("full", None, 0)] * 2
    with pytest.raises(UnsupportedOperation, match="pip install kvrack-mamba"):
        kt.create_cache(config, "dynamic")


@pytest.mark.usefixtures("without_companions")
def test_encoder_decoder_is_named_and_refused_with_the_pip_line():
    config = transformers.T5Config(vocab_size=64, d_model=64, num_layers=2, num_decoder_layers=3, num_heads=4)
    spec = kt.model_spec(config)
    assert (len(spec.layers), len(spec.cross_layers), spec.is_encoder_decoder) == (3, 3, True)
    with pytest.raises(UnsupportedOperation, match="pip install kvrack-encoder-decoder"):
        kt.create_cache(config, "dynamic")


def test_layers_without_attention_hold_nothing():
    config = transformers.LlamaConfig(**SMALL)
    config.layer_types = ["attention", "mlp", "moe", "full_attention"]
    assert kinds(config) == [("full", None, 0), (None, None, 0), (None, None, 0), ("full", None, 0)]


def test_unknown_layer_type_is_named():
    config = transformers.LlamaConfig(**SMALL)
    config.layer_types = ["full_attention", "holographic_attention", "full_attention", "full_attention"]
    with pytest.raises(
        kt.UnknownLayerType, match=r"layer 1 of llama is of type 'holographic_attention'.*Known types: .*full_attention"
    ):
        kt.model_spec(config)


def test_sliding_layers_without_a_window_are_a_clear_error():
    config = transformers.LlamaConfig(**SMALL)
    config.layer_types = ["sliding_attention"] * 4
    with pytest.raises(ValueError, match=r"config\.sliding_window is None"):
        kt.model_spec(config)


def test_a_model_says_its_class(llama):
    assert kt.model_spec(llama).name == "LlamaForCausalLM"
