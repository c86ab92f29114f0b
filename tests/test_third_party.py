"""A backend by a stranger, tests/third_party/kvrack_sinks, built and installed as its users would, then used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvrack
import kvrack_transformers as kt
from kvrack import registry

PROJECT = Path(__file__).parent / "third_party" / "kvrack_sinks"
N_SINK, WINDOW = 2, 8


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of distributions with the built plugin in it."""
    folder = tmp_path_factory.mktemp("site")
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*install, "--target", str(folder), str(PROJECT)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def sinks(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The plugin installed in this process."""
    monkeypatch.syspath_prepend(str(site))
    registry.refresh()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "kvrack_sinks"]:
        del sys.modules[name]
    registry.refresh()


@pytest.mark.parametrize("settings", [(), (f"n_sink={N_SINK}", f"window={WINDOW}")], ids=["default", "small-window"])
def test_it_conforms(site: Path, tmp_path: Path, settings: tuple[str, ...]) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "kvrack.cli", "conform", "sinks", "--quick", "--json", str(report)]
    done = subprocess.run(
        [*command, *(part for pair in settings for part in ("--set", pair))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("CONFORMS ")
    declared = json.loads(report.read_text())
    assert (declared["window"], declared["sinks"]) == ((WINDOW, N_SINK) if settings else (1024, 4))
    assert declared["capabilities"]["slides"] == {"declared": False, "result": "refused"}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.usefixtures("sinks")
def test_a_model_attends_to_the_sinks_and_the_window_and_nothing_else() -> None:
    model = tiny_llama()
    tokens = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    query, key = torch.arange(40).view(-1, 1), torch.arange(40).view(1, -1)
    seen = (key <= query) & ((key < N_SINK) | (key > query - WINDOW))
    mask = torch.zeros(40, 40).masked_fill(~seen, torch.finfo(torch.float32).min).expand(2, 1, 40, 40)
    cache = kt.create_cache(model, "sinks", n_sink=N_SINK, window=WINDOW)
    with torch.no_grad():
        wanted = model(tokens, attention_mask=mask, use_cache=False).logits
        everything = model(tokens, use_cache=False).logits
        steps = [tokens[:, :5], *(tokens[:, i : i + 1] for i in range(5, 40))]
        logits = torch.cat([model(step, past_key_values=cache, use_cache=True).logits for step in steps], dim=1)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits, everything, rtol=1e-2, atol=1e-3)


@pytest.mark.usefixtures("sinks")
def test_a_causal_mask_hides_no_sink_when_several_tokens_come_at_once() -> None:
    model = tiny_llama()
    tokens = torch.randint(0, 64, (1, 30), generator=torch.Generator().manual_seed(2))
    # The tokens of one update see, besides each other, what was held before: the last 3 come together.
    query, key = torch.arange(30).view(-1, 1), torch.arange(30).view(1, -1)
    start = torch.where(query < 27, query, 27)
    seen = (key <= query) & ((key < N_SINK) | (key > start - WINDOW))
    mask = torch.zeros(30, 30).masked_fill(~seen, torch.finfo(torch.float32).min).expand(1, 1, 30, 30)
    cache = kt.create_cache(model, "sinks", n_sink=N_SINK, window=WINDOW)
    with torch.no_grad():
        wanted = model(tokens, attention_mask=mask, use_cache=False).logits
        steps = [*(tokens[:, i : i + 1] for i in range(27)), tokens[:, 27:]]
        logits = torch.cat([model(step, past_key_values=cache, use_cache=True).logits for step in steps], dim=1)
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("sinks")
def test_mask_sizes_are_those_that_the_guide_tells() -> None:
    layer = kvrack.create_cache("sinks", kvrack.ModelSpec.uniform(1), n_sink=2, window=8).layers[0]
    assert isinstance(layer, kvrack.AttentionLayer)
    states = torch.arange(101.0).view(1, 1, -1, 1).expand(1, 1, 101, 16)
    layer.update(states[:, :, :100], states[:, :, :100])
    assert layer.get_mask_sizes(1) == (10, 91)
    keys, _ = layer.update(states[:, :, 100:], states[:, :, 100:])
    assert keys[0, 0, :, 0].tolist() == [0, 1, *range(93, 101)]


@pytest.mark.usefixtures("sinks")
def test_memory_stays_bounded_and_a_sliding_model_is_refused() -> None:
    cache = kvrack.create_cache("sinks", kvrack.ModelSpec.uniform(1), n_sink=N_SINK, window=WINDOW)
    sizes = []
    for _ in range(300):
        cache.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16), 0)
        sizes.append(cache.nbytes)
    assert len(set(sizes[50:])) == 1
    assert cache.get_seq_length() == 300
    with pytest.raises(kvrack.UnsupportedOperation, match="slides"):
        kvrack.create_cache("sinks", kvrack.ModelSpec.uniform(1, kvrack.LayerSpec("sliding", window=4)))
