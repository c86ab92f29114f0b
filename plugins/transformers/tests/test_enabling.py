"""enable() and disable(): names in generate and GenerationConfig, and transformers restored exactly."""

import json
import logging

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import configuration_utils

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

IDS = torch.tensor([[5, 6, 7, 8]])


def answer(model, **settings):
    return model.generate(
        IDS,
        attention_mask=torch.ones_like(IDS),
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        **settings,
    )


def cache_of(output):
    return getattr(output, CACHE_ARGUMENT)


def test_generate_builds_the_named_backend_with_its_config(llama, enabled):
    output = answer(llama, cache_implementation="dynamic", cache_config={"growth": 2.0})
    cache = cache_of(output)
    assert isinstance(cache, kt.TransformersCache)
    assert cache.rack.backend.name == "dynamic"
    assert cache.rack.config.growth == 2.0
    assert torch.equal(output.sequences, answer(llama, use_cache=False).sequences)


def test_generation_config_accepts_names_also_from_a_file(llama, enabled, tmp_path):
    config = GenerationConfig(
        cache_implementation="dynamic", cache_config={"growth": 1.5}, max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert (loaded.cache_implementation, loaded.cache_config) == ("dynamic", {"growth": 1.5})
    loaded.return_dict_in_generate = True
    output = llama.generate(IDS, attention_mask=torch.ones_like(IDS), generation_config=loaded)
    assert cache_of(output).rack.config.growth == 1.5


def test_the_same_cache_config_can_be_passed_twice(llama, enabled):
    config = {"growth": 1.5}
    for _ in range(2):
        assert cache_of(answer(llama, cache_implementation="dynamic", cache_config=config)).rack.config.growth == 1.5
    assert config == {"growth": 1.5}


def test_unknown_name_lists_installed_and_closest(llama, enabled):
    with pytest.raises(
        kvrack.UnknownBackend, match=r"unknown cache backend 'dynamik'\. Installed: .*dynamic.*Did you mean 'dynamic'\?"
    ):
        answer(llama, cache_implementation="dynamik")


def test_name_of_a_known_distribution_says_what_to_install(enabled, monkeypatch):
    monkeypatch.setattr("kvrack_transformers.enabling.installed", lambda: {"dynamic": ()})
    with pytest.raises(kvrack.UnknownBackend, match=r"pip install kvrack-hqq"):
        GenerationConfig(cache_implementation="hqq")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"banana": 1}, r"unknown key 'banana'\. Valid keys: growth"),
        ({"growt": 2}, r"Did you mean 'growth'\?"),
        ({"growth": "much"}, r"growth: .*got 'much'"),
        ({"growth": 1.0}, r"growth: .*greater than 1.*got 1\.0"),
    ],
)
def test_wrong_config_is_refused_before_anything_runs(llama, enabled, config, text):
    with pytest.raises(kvrack.InvalidConfig, match=text):
        answer(llama, cache_implementation="dynamic", cache_config=config)


def test_saved_config_naming_what_is_not_installed_says_so_on_load(enabled, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"cache_implementation": "nonesuch"}))
    with pytest.raises(kvrack.UnknownBackend, match="nonesuch"):
        GenerationConfig.from_pretrained(tmp_path)


def test_disable_restores_transformers_exactly(llama):
    before = (
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        GenerationConfig.validate,
        GenerationMixin._prepare_cache_for_generation,
    )
    kt.enable()
    kt.enable()
    assert kt.is_enabled()
    answer(llama, cache_implementation="dynamic")
    GenerationConfig(cache_implementation="dynamic")
    kt.disable()
    kt.disable()
    assert not kt.is_enabled()
    after = (
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        GenerationConfig.validate,
        GenerationMixin._prepare_cache_for_generation,
    )
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert isinstance(cache_of(answer(llama, cache_implementation="dynamic")), DynamicCache)


def test_without_a_name_generate_does_what_it_did(llama, enabled):
    assert type(cache_of(answer(llama))) is DynamicCache


def test_transformers_own_names_still_serve_with_a_warning(llama, enabled, monkeypatch, caplog):
    monkeypatch.setattr("kvrack_transformers.enabling.installed", lambda: {"dynamic": ()})
    monkeypatch.setattr("kvrack_transformers.enabling._warned", set())
    with caplog.at_level(logging.WARNING, logger="kvrack"):
        output = answer(llama, cache_implementation="static")
        answer(llama, cache_implementation="static")
    assert type(cache_of(output)).__module__.startswith("transformers")
    assert [record.getMessage() for record in caplog.records if record.name.startswith("kvrack")] == [
        "cache_implementation='static': transformers' own cache serves. For kvrack's: pip install kvrack-static"
    ]


def test_name_and_cache_together_are_refused_by_transformers(llama, enabled):
    with pytest.raises(ValueError, match="cache_implementation"):
        answer(llama, cache_implementation="dynamic", **{CACHE_ARGUMENT: kt.create_cache(llama, "dynamic")})


def test_beams_on_a_cache_filled_at_batch_one_is_a_clear_error(llama, enabled):
    cache = kt.create_cache(llama, "dynamic")
    llama(IDS, use_cache=True, **{CACHE_ARGUMENT: cache})
    longer = torch.cat([IDS, IDS], dim=1)
    with pytest.raises(kvrack.ShapeMismatch, match=r"holds batch 1.*got batch 3.*batch_repeat_interleave"):
        llama.generate(longer, num_beams=3, max_new_tokens=2, **{CACHE_ARGUMENT: cache})


def test_a_cache_is_used_saved_loaded_and_forked_by_hand(llama, tmp_path):
    cache = kt.create_cache(llama, "dynamic")
    with torch.no_grad():
        llama(IDS, use_cache=True, **{CACHE_ARGUMENT: cache})
    cache.save(tmp_path / "prefix.kv")
    next_id = torch.tensor([[9]])
    copies = [cache.fork(), kt.TransformersCache(kvrack.load(tmp_path / "prefix.kv")), cache]
    with torch.no_grad():
        logits = [llama(next_id, use_cache=True, **{CACHE_ARGUMENT: each}).logits for each in copies]
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[1], logits[2])
    assert [each.get_seq_length() for each in copies] == [5, 5, 5]
    assert cache.nbytes == sum(row.nbytes for row in cache.memory()) > 0


def test_gradient_reaches_the_projections_through_the_cache(llama):
    cache = kt.create_cache(llama, "dynamic")
    llama(IDS, use_cache=True, **{CACHE_ARGUMENT: cache}).logits.sum().backward()
    key_gradient = llama.model.layers[0].self_attn.k_proj.weight.grad.clone()
    llama.zero_grad()
    llama(IDS, use_cache=False).logits.sum().backward()
    torch.testing.assert_close(key_gradient, llama.model.layers[0].self_attn.k_proj.weight.grad)
    llama.zero_grad()
    assert not any(tensor.requires_grad for layer in cache.layers for tensor in layer.storage().values())
