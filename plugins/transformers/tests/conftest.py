import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import kvrack_transformers as kt
from kvrack.registry import refresh
from kvrack_transformers.bench.results import Bench, Context, Machine, Measurement, Request, Side

TINY = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.fixture(scope="session")
def llama() -> transformers.PreTrainedModel:
    """A Llama of two layers with random weights."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, vocab_size=64)).eval()


@pytest.fixture(scope="session")
def mistral() -> transformers.PreTrainedModel:
    """A model like it with a window of 6."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**TINY, vocab_size=64, sliding_window=6)
    return transformers.MistralForCausalLM(config).eval()


@pytest.fixture
def enabled():
    """kvrack's names in transformers for the length of a test."""
    kt.enable()
    yield
    kt.disable()


LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
SPACES = [("Ġ", "Ġ"), ("ĠĠ", "Ġ")]
"""Merges of the tiny tokenizer: two spaces, and three, are a token each."""


@pytest.fixture(scope="session")
def tiny_vocabulary() -> list[str]:
    """The tokens of the tiny tokenizer: three special ones, every byte, and two runs of spaces."""
    return ["<unk>", "<s>", "</s>", *LETTERS, "ĠĠ", "ĠĠĠ"]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_vocabulary: list[str]) -> Path:
    """A folder with a tiny Llama of random weights, 96 positions, and a byte-level tokenizer without chat template."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**TINY, vocab_size=len(tiny_vocabulary), max_position_embeddings=96)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tiny_vocabulary)}, SPACES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    ).save_pretrained(folder)
    return folder


FAKE_BACKENDS = """
import kvrack

@kvrack.hookimpl
def kvrack_backend(name):
    if name == "moon":
        raise RuntimeError("the moon is in the wrong phase")
    return kvrack.Backend(name=name, summary="a fake", layer=f"fake_layers:{name}", config="fake_layers:Config")
"""
FAKE_LAYERS = """
import signal

import kvrack

class Config(kvrack.BackendConfig):
    remember: bool = False

class forgetful(kvrack.BufferedLayer):
    capabilities = kvrack.Capabilities(grows=True, relative_error=1.0)

    def update(self, key_states, value_states):
        keys, values = super().update(key_states, value_states)
        return keys, values * (self.config.remember or key_states.shape[2] > 1)

class impatient(kvrack.BufferedLayer):
    capabilities = kvrack.Capabilities(grows=True, lossless=True)

    def update(self, key_states, value_states):
        if self.get_seq_length() == 40:
            signal.raise_signal(signal.SIGINT)
        return super().update(key_states, value_states)

def refuses(spec, config, context):
    raise kvrack.UnsupportedOperation("refuses", "any model at all", "Choose another")
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """More backends: one forgets, one presses Ctrl-C after 40 tokens, one refuses every model, one is broken."""
    info = tmp_path / "fakes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fakes\nVersion: 1.0\n")
    names = "".join(f"{name} = fake_backends\n" for name in ("forgetful", "impatient", "moon", "refuses"))
    (info / "entry_points.txt").write_text(f"[kvrack]\n{names}")
    (tmp_path / "fake_backends.py").write_text(FAKE_BACKENDS)
    (tmp_path / "fake_layers.py").write_text(FAKE_LAYERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    refresh()
    yield
    for module in ("fake_backends", "fake_layers"):
        sys.modules.pop(module, None)


@pytest.fixture
def result() -> Bench:
    """What a benchmark may have found: two contexts, pairs, one that fails, names that must be escaped."""

    def measured(cache: str, side: Side, step: float, stored: int, kl: float, **more: Any) -> Measurement:
        return Measurement(
            cache=cache, side=side, made_by=f"{cache}()", prefill_seconds=(1.0,),
            step_seconds=((step, step * 1.1), (step * 0.9, step)), stored_bytes=stored, stored_by_place={"cpu": stored},
            peak_bytes=2 * stored, peak_decode_bytes=stored, perplexity=5.0, kl=kl, agreement=0.9,
            floor_seconds=step / 2, **more,
        )  # fmt: skip

    def context(tokens: int) -> Context:
        dense = 1000 * tokens
        return Context(
            tokens=tokens,
            held=tokens + 16,
            bandwidth=1e10,
            measurements=(
                measured("dynamic", "transformers", 0.03, dense, 0.0),
                measured("dynamic", "kvrack", 0.02, dense, 0.0),
                measured("fp8", "kvrack", 0.03, dense // 4, 0.01),
                measured("fp8", "transformers", 0.05, dense // 3, 0.02),
                measured("hqq:nbits=2", "kvrack", 0.04, dense // 10, 0.3, moved_in=5000.0, moved_out=10.0),
                Measurement(cache="<script>alert(1)</script>", side="kvrack", made_by="x", error="it broke"),
            ),
        )

    return Bench(
        created="2026-01-01T00:00:00+00:00",
        machine=Machine(
            processor="AMD EPYC", cores=2, memory=1 << 34, system="Linux x86_64", device="cpu", threads=2,
            versions={"Python": "3.11", "torch": "2.13.0", "transformers": "5.24.0"},
        ),
        request=Request(
            model="tiny", parameters=10**6, weight_bytes=4 * 10**6, dtype="float32", attention="sdpa",
            kvrack_attention="sdpa", caches=("dynamic", "fp8", "hqq:nbits=2"), contexts=(512, 4096), new_tokens=2,
            repeats=2, batch=1, against="transformers", text="a text",
        ),
        contexts=(context(512), context(4096)),
        left_out={"transformers hqq:nbits=2": "transformers can't"},
    )  # fmt: skip
