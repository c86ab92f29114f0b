"""Models that accelerate dispatched: their weights on the CPU and on disk, their caches where their layers run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from transformers import PreTrainedModel

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

sys.path.insert(0, str(Path(__file__).parent))
from ranks import USES, WINDOWED, generate, prompt, used

MAPS = {
    # The first weight of each is on the meta device between forwards.
    "all on disk": {},
    "first layer on disk": {"model.embed_tokens": "disk", "model.layers.0": "disk", "model.layers.1": "cpu"},
    "last layer on disk": {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"},
}
REST = {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    kt.enable()
    yield
    kt.disable()


def whole(folder: Path, name: str = "llama") -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()


def dispatched(model: PreTrainedModel, device_map: dict[str, str], offload: Path) -> PreTrainedModel:
    if not device_map:
        return accelerate.disk_offload(model, offload, torch.device("cpu"))
    return accelerate.dispatch_model(
        model, {**device_map, **REST}, main_device="cpu", offload_dir=offload, force_hooks=True
    )


@pytest.fixture(params=MAPS)
def offloaded(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> PreTrainedModel:
    """The tiny Llama, dispatched in each way."""
    return dispatched(whole(folder), MAPS[request.param], tmp_path)


@pytest.mark.parametrize("use", USES)
def test_it_answers_through_every_cache(folder: Path, tmp_path: Path, use: str) -> None:
    backend, config = USES[use]
    ids = prompt(rows=2)
    for name in ("llama", "mistral") if use in WINDOWED else ("llama",):
        model = dispatched(whole(folder, name), MAPS["first layer on disk"], tmp_path / name)
        tokens, cache = used(model, ids, backend, config)
        assert tokens == used(whole(folder, name), ids, backend, config)[0]
        assert {row.device for row in cache.memory()} <= {"cpu", "disk"}


def test_a_fingerprint_is_the_same_wherever_the_weights_are(folder: Path, offloaded: PreTrainedModel) -> None:
    assert any(weight.is_meta for weight in offloaded.parameters())
    assert kt.fingerprint(offloaded) == kt.fingerprint(whole(folder))


def test_a_fingerprint_tells_offloaded_fine_tunes_apart(folder: Path, tmp_path: Path) -> None:
    tuned = whole(folder)
    tuned.model.layers[1].self_attn.k_proj.weight.data += 0.01
    seen = [kt.fingerprint(dispatched(model, {}, tmp_path / str(i))) for i, model in enumerate((whole(folder), tuned))]
    assert seen[0] != seen[1]


def test_weights_that_are_nowhere_have_no_fingerprint(folder: Path) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(folder / "llama"))
    with pytest.raises(ValueError, match=r"model\.embed_tokens\.weight is on the meta device"):
        kt.fingerprint(model)


def test_tied_weights_count_once_moved_too(folder: Path, tmp_path: Path) -> None:
    def tied() -> PreTrainedModel:
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(folder / "llama", tie_word_embeddings=True)
        return transformers.LlamaForCausalLM(config).eval()

    expected = kt.fingerprint(tied())
    assert kt.fingerprint(dispatched(tied(), {}, tmp_path)) == expected


def test_a_cache_is_saved_and_loaded_for_it(folder: Path, offloaded: PreTrainedModel, tmp_path: Path) -> None:
    model, ids = whole(folder), prompt()
    tokens, cache = used(model, ids, "dynamic", {})
    cache.save(tmp_path / "prefix.kv", kt.fingerprint(model))
    loaded = kt.load(offloaded, tmp_path / "prefix.kv", kt.fingerprint(offloaded))
    following = torch.tensor([tokens])
    assert torch.equal(
        generate(offloaded, following, **{CACHE_ARGUMENT: loaded}), generate(model, following, use_cache=False)
    )


def test_a_prefix_is_computed_and_stored_for_it(folder: Path, offloaded: PreTrainedModel, tmp_path: Path) -> None:
    assert [str(device) for device in kt.layer_devices(offloaded)] == ["cpu", "cpu"]
    ids = prompt(length=20)
    expected = generate(whole(folder), ids, use_cache=False)
    for hits in (0, 1):
        store = kvrack.PrefixStore(1 << 30, tmp_path / "store", kt.fingerprint(offloaded), kt.layer_devices(offloaded))
        got = kt.generate(
            offloaded, ids, prefix_store=store, do_sample=False, max_new_tokens=10, num_return_sequences=1
        )
        assert torch.equal(got, expected)
        assert store.stats.hits == hits


def test_a_model_is_loaded_with_a_map(folder: Path, tmp_path: Path) -> None:
    given = {**MAPS["last layer on disk"], **REST}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "llama", dtype=torch.float32, device_map=given, offload_folder=tmp_path
    ).eval()
    assert kt.fingerprint(model) == kt.fingerprint(whole(folder))
    expected = generate(whole(folder), prompt(), use_cache=False)
    assert torch.equal(generate(model, prompt(), cache_implementation="dynamic"), expected)
