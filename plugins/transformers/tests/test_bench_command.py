"""``kvrack bench`` from end to end, with a tiny model."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from html import unescape
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner, Result

from kvrack.commands import kvrack as group
from kvrack.registry import installed
from kvrack_transformers.bench import command
from kvrack_transformers.bench.page import page
from kvrack_transformers.bench.plots import PLOTS, figures
from kvrack_transformers.bench.results import Bench, read
from kvrack_transformers.bench.text import DEFAULT_TEXT, read_text, tokens_of

FILES = {"bench.json", "bench.html", *(f"{name}.png" for name in PLOTS)}
SHORT = ("--context", "16,32", "--new-tokens", "4", "--repeats", "2", "--threads", "1")


def run(*args: str) -> Result:
    return CliRunner().invoke(group, ["bench", *args], prog_name="kvrack")


def refused(*args: str) -> str:
    """Run a command that must fail; return its one line."""
    result = run(*args)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 400 letters."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("It was the best of times, it was the worst of times. " * 8)
    return file


@pytest.fixture(scope="module")
def deep_folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with four layers instead of two."""
    folder = tmp_path_factory.mktemp("deep")
    config = transformers.AutoConfig.from_pretrained(model_folder)
    config.num_hidden_layers, config.layer_types = 4, None
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    return folder


# --- measuring -----------------------------------------------------------------------------------


def test_measures_pairs_and_keeps_going_after_a_failure(model_folder: Path, fakes: None, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = run(
        "--model", str(model_folder), "--cache", "dynamic", "--cache", "forgetful", "--cache", "refuses",
        "--cache", "dynamic:growth=2", "--against", "transformers", "--out", str(out), *SHORT,
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    assert {each.name for each in out.iterdir()} == FILES
    found = read(out / "bench.json")
    assert [context.tokens for context in found.contexts] == [16, 32]
    assert set(found.left_out) == {"transformers forgetful", "transformers refuses"}
    for context in found.contexts:
        of = {(each.side, each.cache): each for each in context.measurements}
        assert [key[1] for key in of] == ["dynamic", "dynamic", "forgetful", "refuses", "dynamic:growth=2"]
        dense, exact = of["transformers", "dynamic"], of["kvrack", "dynamic"]
        assert dense.kl == 0
        assert exact.is_exact
        assert exact.agreement == 1
        assert exact.perplexity == pytest.approx(expected_perplexity(model_folder, context.tokens), rel=1e-4)
        assert of["kvrack", "forgetful"].kl > 0.01
        assert "any model at all" in (of["kvrack", "refuses"].error or "")
        # Two layers, two heads, keys and values of 16 float32: 512 bytes a token.
        assert dense.stored_bytes == 512 * (context.tokens + 3 * 4)
        assert dense.stored_by_place == {"cpu": dense.stored_bytes}
        for each in (dense, exact):
            assert [len(repeat) for repeat in each.step_seconds] == [4, 4]
            assert len(each.prefill_seconds) == 2
            assert 512 * context.tokens < each.peak_decode_bytes <= each.peak_bytes
            assert each.floor_seconds == pytest.approx(
                (found.request.weight_bytes + dense.stored_bytes) / context.bandwidth
            )
    assert "refuses failed: " in result.stdout
    assert "transformers (dense)" in result.stdout
    assert "kvrack / transformers" in result.stdout


def expected_perplexity(folder: Path, context: int) -> float:
    """Return the perplexity of the 12 tokens after the prompt, by a model that has no cache at all."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(read_text(None)[0][:2000], return_tensors="pt").input_ids[:, : context + 13]
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0, context:-1]
    return math.exp(torch.nn.functional.cross_entropy(logits, ids[0, context + 1 :]))


def test_rows_and_dtype_and_attention(model_folder: Path, text: Path, tmp_path: Path) -> None:
    result = run(
        "--model", str(model_folder), "--batch", "3", "--dtype", "bfloat16", "--text", str(text),
        "--out", str(tmp_path), "--context", "24", "--new-tokens", "3", "--repeats", "1",
        "--threads", "1", "--attention", "kvrack",
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    found = read(tmp_path / "bench.json")
    asked = found.request
    assert (asked.batch, asked.dtype, asked.text) == (3, "bfloat16", "text.txt")
    assert (asked.attention, asked.kvrack_attention) == ("sdpa", "kvrack")
    dense = found.contexts[0].reference
    assert dense is not None
    assert dense.stored_bytes == 3 * 256 * 30
    assert found.contexts[0].find(("kvrack", "dynamic")).kl < 1e-3
    assert transformers.AttentionInterface().get("kvrack") is None


def test_rows_are_parts_of_the_text_one_after_the_other(model_folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    text = read_text(None)[0]
    rows = tokens_of(tokenizer, text, DEFAULT_TEXT, rows=2, length=40, vocabulary=300)
    assert tokenizer.decode(rows[0]) + tokenizer.decode(rows[1]) == text[:80]


@pytest.mark.skipif(
    not {"fp8", "hqq", "mamba", "offloaded", "quanto", "static"} <= set(installed()),
    reason="needs the project's other backends; they are installed in tox's `all`",
)
def test_every_kind_beside_transformers(deep_folder: Path, tmp_path: Path) -> None:
    result = run(
        "--model", str(deep_folder), "--cache", "all", "--cache", "static:max_cache_len=90", "--cache",
        "offloaded:tier=disk", "--cache", "hqq:nbits=2,residual_length=8", "--against", "transformers",
        "--out", str(tmp_path), "--context", "48", "--new-tokens", "4", "--repeats", "1", "--threads", "1",
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    found = read(tmp_path / "bench.json")
    (context,) = found.contexts
    of = {(each.side, each.cache): each for each in context.measurements}
    assert [each.label for each in context.measurements if each.error] == []
    for kind in ("static", "static:max_cache_len=90", "fp8", "hqq", "quanto", "hqq:nbits=2,residual_length=8"):
        assert {("kvrack", kind), ("transformers", kind)} <= set(of)
    dense = of["transformers", "dynamic"].stored_bytes
    assert of["transformers", "static:max_cache_len=90"].stored_bytes == pytest.approx(1024 * 90, rel=0.01)
    assert of["kvrack", "static:max_cache_len=90"].stored_bytes == pytest.approx(1024 * 90, rel=0.01)
    assert of["transformers", "fp8"].stored_bytes == pytest.approx(dense / 4, rel=0.05)
    assert dense / 16 < of["transformers", "hqq:nbits=2,residual_length=8"].stored_bytes < dense / 2
    assert dense / 8 < of["transformers", "quanto"].stored_bytes < dense / 2
    for kind in ("fp8", "hqq:nbits=2,residual_length=8"):
        assert min(of["kvrack", kind].kl, of["transformers", kind].kl) > 1e-3
    disk = of["kvrack", "offloaded:tier=disk"]
    assert disk.is_exact
    # Four layers take turns in the two places that there are in memory; each holds 256 bytes a token.
    assert 2 * 256 * 48 < disk.moved_in <= 4 * 256 * 56
    assert disk.moved_out == 4 * 256
    assert disk.stored_by_place["disk"] == disk.stored_bytes
    assert "on disk" in found.left_out["transformers offloaded:tier=disk"]
    assert "measured by itself" in found.left_out["mamba"]


def test_interruption_keeps_what_is_done(model_folder: Path, fakes: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(
        "--model", str(model_folder), "--cache", "dynamic", "--cache", "impatient", "--out", str(out),
        "--context", "16,32,64", "--new-tokens", "4", "--repeats", "3", "--threads", "1",
    )  # fmt: skip
    assert result.exit_code == 130, (result.output, result.exception)
    assert "interrupted" in result.stdout
    assert {each.name for each in out.iterdir()} == FILES
    found = read(out / "bench.json")
    assert found.interrupted
    # 16 tokens and 16 decoded never come to 40; after 32 the first timed repeat ends, and the second doesn't.
    whole, part = found.contexts
    for cache in ("dynamic", "impatient"):
        assert [len(repeat) for repeat in whole.find(("kvrack", cache)).step_seconds] == [4, 4, 4]
    assert [len(repeat) for repeat in part.find(("kvrack", "impatient")).step_seconds] == [4]
    assert part.find(("kvrack", "dynamic")).step_seconds[0]
    assert part.find(("kvrack", "dynamic")).kl < 1e-6
    assert part.find(("kvrack", "dynamic")).stored_bytes


# --- what is refused -----------------------------------------------------------------------------


def test_wrong_input_is_refused_in_one_line(model_folder: Path, text: Path, tmp_path: Path) -> None:
    tiny = ("--model", str(model_folder), "--out", str(tmp_path / "out"))
    assert "'dynamik'" in refused(*tiny, "--cache", "dynamik")
    assert "expected key=value, got 'growth'" in refused(*tiny, "--cache", "dynamic:growth")
    assert "unknown key 'grow'" in refused(*tiny, "--cache", "dynamic:grow=2")
    assert "512,2048,4096" in refused(*tiny, "--context", "5,many")
    assert "the model takes 96" in refused(*tiny, "--context", "16,90", "--new-tokens", "4")
    assert "text.txt has 424 tokens" in refused(*tiny, *SHORT, "--text", str(text), "--batch", "40")
    (tmp_path / "file").touch()
    assert "can't be written" in refused("--model", str(model_folder), "--out", str(tmp_path / "file" / "out"))
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    assert "not UTF-8" in refused(*tiny, "--text", str(latin))


def test_missing_extra_gives_the_pip_line(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'kvrack-transformers[bench]'" in refused("--model", str(model_folder))


def test_compare(result: Bench, tmp_path: Path) -> None:
    first, second, other = (tmp_path / name for name in ("a.json", "b.json", "other.json"))
    first.write_text(result.model_dump_json())
    second.write_text(result.model_copy(update={"interrupted": True}).model_dump_json())
    other.write_text("{}")
    shown = run("--compare", str(first), str(second))
    assert shown.exit_code == 0, shown.output
    assert "512 tokens of prompt" in shown.stdout
    assert "interrupted" in shown.stdout
    assert "something else" in refused("--compare", str(first), str(other))
    other.write_text(first.read_text().replace('"version":1', '"version":2'))
    assert "its version is 2" in refused("--compare", str(other), str(first))
    assert "can't be read" in refused("--compare", str(first), str(tmp_path / "none.json"))


# --- the page ------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>
const faults = [];
addEventListener("securitypolicyviolation", event => faults.push(event.blockedURI));
addEventListener("error", event => faults.push(String(event.message)), true);
addEventListener("load", () => {
  const sizes = [...document.images].map(image => image.naturalWidth + "x" + image.naturalHeight);
  const names = performance.getEntriesByType("resource").map(each => each.name);
  const fetched = names.filter(name => !name.startsWith("data:"));
  const wide = document.documentElement.scrollWidth > document.documentElement.clientWidth;
  document.title = JSON.stringify({sizes, fetched, faults, wide});
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
def test_page_opens_in_a_browser(result: Bench, tmp_path: Path) -> None:
    from matplotlib.image import imread

    text = page(result, figures(result))
    (tmp_path / "bench.html").write_text(text, encoding="utf-8")
    # The page allows no script; its probed copy allows that one kind more.
    probed = text.replace("default-src 'none';", "default-src 'none'; script-src 'unsafe-inline';")
    (tmp_path / "probed.html").write_text(probed.replace("<style>", f"{PROBE}<style>", 1), encoding="utf-8")
    dom = browse(tmp_path, "probed.html", "--dump-dom").stdout
    title = re.search(r"<title>(.*?)</title>", dom)
    assert title is not None
    seen = json.loads(unescape(title[1]))
    assert seen["fetched"] == []
    assert seen["faults"] == []
    assert not seen["wide"], "on a narrow screen the page must be scrolled sideways"
    sizes = [tuple(map(int, size.split("x"))) for size in seen["sizes"]]
    assert len(sizes) == len(PLOTS)
    assert all(width > 300 and height > 300 for width, height in sizes)

    logged = browse(tmp_path, "bench.html", f"--screenshot={tmp_path / 'page.png'}", "--enable-logging=stderr").stderr
    assert "CONSOLE" not in logged
    picture = imread(tmp_path / "page.png")
    assert picture.shape[:2] == (1400, 500)
    colours = {tuple(pixel) for pixel in (picture[::4, ::4, :3] * 255).astype(int).reshape(-1, 3).tolist()}
    assert len(colours) > 50


def browse(folder: Path, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Open a file in a browser as wide as a large phone that has no network."""
    assert CHROMIUM is not None
    profile = folder / f"profile-{time.time_ns()}"
    profile.mkdir()
    return subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars",
            f"--user-data-dir={profile}", "--proxy-server=127.0.0.1:9", "--window-size=500,1400", *arguments,
            (folder / name).as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
