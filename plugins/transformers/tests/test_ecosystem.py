"""What is built on transformers takes kvrack's names too: pipelines, PEFT's adapters, and configs that are saved."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel, pipeline

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

IDS = torch.tensor([[5, 6, 7, 8]])
SETTINGS = {"cache_implementation": "dynamic", "cache_config": {"growth": 2.0}}
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture
def adapted(model_folder: Path) -> peft.PeftModel:
    """The tiny model with a LoRA adapter whose weights aren't zero."""
    torch.manual_seed(1)
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config).eval()


@pytest.mark.parametrize("is_said_once", [True, False])
def test_a_pipeline_takes_name_and_config(enabled, model_folder, is_said_once):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(model_folder), AutoTokenizer.from_pretrained(model_folder)
    plain = pipeline("text-generation", model=model, tokenizer=tokenizer)("a rack", use_cache=False, **GREEDY)
    once, each = (SETTINGS, {}) if is_said_once else ({}, SETTINGS)
    named = pipeline("text-generation", model=model, tokenizer=tokenizer, **once)
    told: list[kvrack.CacheEvent] = []
    with kvrack.listen(told.append):
        assert named(["a rack", "a rack"], batch_size=2, **each, **GREEDY) == [plain, plain]
    assert [event.backend for event in told if event.kind == "created"] == ["dynamic"]


def test_a_pipeline_refuses_what_a_backend_does(enabled, model_folder):
    named = pipeline("text-generation", model=str(model_folder), cache_implementation="dynamic")
    with pytest.raises(kvrack.InvalidConfig, match="Did you mean 'growth'"):
        named("a rack", cache_config={"growt": 2})


def test_a_model_with_an_adapter_generates_through_a_named_cache(enabled, adapted):
    mask = torch.ones_like(IDS)
    plain = adapted.generate(input_ids=IDS, attention_mask=mask, use_cache=False, **GREEDY)
    output = adapted.generate(input_ids=IDS, attention_mask=mask, return_dict_in_generate=True, **SETTINGS, **GREEDY)
    assert torch.equal(output.sequences, plain)
    assert getattr(output, CACHE_ARGUMENT).rack.config.growth == 2.0
    with adapted.disable_adapter():
        bare = adapted.generate(input_ids=IDS, attention_mask=mask, use_cache=False, **GREEDY)
        assert torch.equal(adapted.generate(input_ids=IDS, attention_mask=mask, **SETTINGS, **GREEDY), bare)
    assert not torch.equal(bare, plain)


def test_a_model_with_an_adapter_serves_whatever_takes_a_model(adapted):
    assert not kt.is_enabled()
    plain = adapted.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), use_cache=False, **GREEDY)
    store = kvrack.PrefixStore(1 << 20, fingerprint=kt.fingerprint(adapted))
    for _ in range(2):
        again = kt.generate(adapted, input_ids=IDS, prefix_store=store, cache_implementation="dynamic", **GREEDY)
        assert torch.equal(again, plain)
    assert store.stats.tokens == IDS.shape[1] - 1
    assert kt.model_spec(adapted).layers == kt.model_spec(adapted.get_base_model()).layers


# --- configs that are saved -----------------------------------------------------------------------


def saved(folder: Path, **settings: object) -> Path:
    """Write a generation config as it would have been saved."""
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder


def test_a_model_keeps_its_name_and_config(enabled, llama, tmp_path):
    before = llama.generation_config
    llama.generation_config = GenerationConfig(pad_token_id=0, **SETTINGS)
    try:
        llama.save_pretrained(tmp_path)
    finally:
        llama.generation_config = before
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, PreTrainedModel)
    assert loaded.generation_config.cache_config == {"growth": 2.0}
    output = loaded.generate(IDS, attention_mask=torch.ones_like(IDS), return_dict_in_generate=True, **GREEDY)
    assert getattr(output, CACHE_ARGUMENT).rack.config.growth == 2.0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({**SETTINGS, "cache_config": {"growt": 2}}, r"'dynamic': unknown key 'growt'\..*Did you mean 'growth'\?"),
        ({**SETTINGS, "cache_config": {"growth": "much"}}, r"growth: input should be a valid number.*got 'much'"),
        ({**SETTINGS, "cache_config": [2]}, "expected a dict of keys, got list"),
        ({"cache_implementation": "dynamik"}, r"unknown cache backend 'dynamik'\..*Did you mean 'dynamic'\?"),
        ({"cache_implementation": 7}, r"unknown cache backend '7'\. Installed: "),
        (
            {"cache_implementation": "quantized", "cache_config": {"backend": "dynamic"}},
            "backend: expected one of quanto",
        ),
        ({"cache_implementation": "quantized", "cache_config": [2]}, "'quantized': expected a dict of keys, got list"),
    ],
)
def test_a_saved_config_is_validated_when_loaded(enabled, tmp_path, settings, text):
    with pytest.raises(ValueError, match=text):
        GenerationConfig.from_pretrained(saved(tmp_path, **settings))


@pytest.mark.parametrize("name", ["fp8", "hqq", "offload"])
def test_a_saved_config_naming_what_is_not_installed_gives_the_pip_line(enabled, monkeypatch, llama, tmp_path, name):
    monkeypatch.setattr("kvrack_transformers.enabling.installed", lambda: {"dynamic": ()})
    with pytest.raises(kvrack.UnknownBackend, match=rf"pip install kvrack-{name}$"):
        GenerationConfig.from_pretrained(saved(tmp_path, cache_implementation=name))
    # Nor is it passed over when a model is loaded with it.
    llama.save_pretrained(tmp_path)
    with pytest.raises(kvrack.UnknownBackend, match=rf"pip install kvrack-{name}$"):
        AutoModelForCausalLM.from_pretrained(saved(tmp_path, cache_implementation=name))


def test_an_invalid_config_is_not_saved(enabled, tmp_path):
    config = GenerationConfig(**SETTINGS)
    config.cache_config = {"growt": 2}
    with pytest.raises(ValueError, match="Did you mean 'growth'"):
        config.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_enable_transformers_refuses_names_of_kvrack_alone(llama, tmp_path):
    assert not kt.is_enabled()
    with pytest.raises(ValueError, match=r"Invalid `cache_implementation` \(fp8\)"):
        GenerationConfig.from_pretrained(saved(tmp_path, cache_implementation="fp8"))
    output = kt.generate(llama, IDS, attention_mask=torch.ones_like(IDS), return_dict_in_generate=True, **SETTINGS)
    assert isinstance(getattr(output, CACHE_ARGUMENT), kt.TransformersCache)
