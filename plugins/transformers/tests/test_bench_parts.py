"""The parts of ``kvrack bench``, each by itself."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import transformers
from pydantic import BaseModel
from rich.console import Console
from torch.utils._python_dispatch import _get_current_dispatch_mode

import kvrack
from kvrack_transformers.bench import bandwidth, theirs
from kvrack_transformers.bench.allocations import PeakBytes
from kvrack_transformers.bench.compare import differences, render_comparison
from kvrack_transformers.bench.entries import Asked, Entry, parse_cache, parse_caches
from kvrack_transformers.bench.measure import ContextRun, Plan
from kvrack_transformers.bench.page import page
from kvrack_transformers.bench.plots import PLOTS, best_choices, figures, looks_of, png
from kvrack_transformers.bench.quality import Dense, NotFinite, Quality
from kvrack_transformers.bench.results import (
    Bench,
    BenchFileError,
    Context,
    Machine,
    Measurement,
    Request,
    read,
    write,
)
from kvrack_transformers.bench.table import render
from kvrack_transformers.bench.text import python_reference

CPU = torch.device("cpu")


def test_the_command_is_there_before_torch_is() -> None:
    code = """
import sys
import kvrack_transformers.bench.command
print(*{"torch", "transformers", "matplotlib"} & {*sys.modules})
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []


# --- which caches --------------------------------------------------------------------------------


def test_settings_are_read_as_json_with_their_commas() -> None:
    asked = parse_cache("dynamic:growth=1.5")
    assert (asked.name, dict(asked.settings), asked.text) == ("dynamic", {"growth": 1.5}, "dynamic:growth=1.5")
    with pytest.raises(kvrack.InvalidConfig, match="inner_config"):
        # That the key is unknown, and not that the value isn't a pair, shows that it was read whole.
        parse_cache('dynamic:inner_config={"nbits": 2, "q_group_size": 32},growth=2')


@pytest.mark.parametrize("text", ["", ":growth=2", "dynamic:", "dynamic:growth", "dynamic:=3"])
def test_what_is_no_cache_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected"):
        parse_cache(text)


def test_all_names_what_it_leaves_out(fakes: None) -> None:
    asked, left_out = parse_caches(("all",))
    assert asked[0].text == "dynamic"
    assert {"forgetful", "refuses"} <= {each.text for each in asked}
    assert "wrong phase" in left_out["moon"]


@pytest.mark.parametrize(
    ("name", "settings", "made_by"),
    [
        ("dynamic", {"growth": 2}, "DynamicCache(config=model.config)"),
        ("static", {"max_cache_len": 64}, "StaticCache(config=model.config, max_cache_len=64)"),
        ("fp8", {}, "QuantizedCache('fp8', model.config)"),
        ("hqq", {"nbits": 2}, "QuantizedCache('hqq', model.config, axis_key=1, axis_value=1, nbits=2)"),
        ("quantized", {"nbits": 2}, "QuantizedCache('quanto', model.config, nbits=2)"),
    ],
)
def test_transformers_cache_of_the_same_kind(name: str, settings: dict[str, Any], made_by: str) -> None:
    assert theirs.counterpart(Asked(name, name, settings), CPU).made_by == made_by


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("hqq", {"nbits_key": 8}, "same bits"),
        ("fp8", {"layout": "static"}, "only grow"),
        ("offloaded", {}, "CUDA"),
        ("offload", {"tier": "disk"}, "on disk"),
        ("offload", {"inner": "fp8"}, "'fp8'"),
        ("int8", {}, "'int8'"),
    ],
)
def test_why_transformers_has_no_such_cache(name: str, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(theirs.NoCounterpart, match=reason):
        theirs.counterpart(Asked(name, name, settings), CPU)


# --- what is measured ----------------------------------------------------------------------------


def test_peak_counts_what_is_alive_at_once_and_not_what_was_there() -> None:
    weight = torch.zeros(1000)
    tracker = PeakBytes([weight])
    with tracker:
        kept = weight + 1
        for _ in range(3):
            passing = torch.empty(500)
            passing.add_(1)
        del passing
        view = weight.view(10, 100) + kept.view(10, 100)
    assert tracker.peak == 4 * 2000
    del view
    assert tracker.now == 4 * 1000
    tracker.peak = tracker.now
    with tracker:
        torch.empty(7)
    assert tracker.peak == 4 * 1007


def test_nothing_is_timed_while_memory_is_watched(llama: transformers.PreTrainedModel) -> None:
    watched: list[tuple[int, bool]] = []

    class Spy(transformers.DynamicCache):
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
        ) -> Any:
            watched.append((key_states.shape[2], isinstance(_get_current_dispatch_mode(), PeakBytes)))
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    entry = Entry("dynamic", "transformers", "Spy()", lambda model, _: Spy(config=model.config))
    run = ContextRun(llama, torch.ones(1, 15, dtype=torch.long), [entry], Plan(8, 2, 2), 0, lambda *_: None)
    run.run()
    assert watched[::2] == watched[1::2]
    # Two timed prompts, one watched, then two steps that are watched and four that are timed.
    assert [tokens for tokens, _ in watched[::2]] == [8, 8, 8, 1, 1, 1, 1, 1, 1]
    assert [seen for _, seen in watched[::2]] == [False, False, True, True, True, False, False, False, False]
    (measured,) = run.context().measurements
    assert (len(measured.prefill_seconds), [len(each) for each in measured.step_seconds]) == (2, [2, 2])


def test_bytes_of_transformers_caches_count_memory_once() -> None:
    cache = transformers.DynamicCache()
    states = torch.zeros(1, 2, 5, 8)
    cache.update(states, states, 0)
    assert theirs.stored_by_place(cache) == {"cpu": 2 * 2 * 5 * 8 * 4}
    cache.layers[0].more = {"nested": [cache.layers[0].keys[:, :1], (torch.zeros(3),)]}
    assert theirs.stored_by_place(cache) == {"cpu": 2 * 2 * 5 * 8 * 4 + 12}


def test_divergence_and_perplexity_are_torch_s() -> None:
    generator = torch.Generator().manual_seed(0)
    dense, seen = torch.randn(2, 4, 3, 11, generator=generator)
    following = torch.randint(11, (4, 3), generator=generator)
    quality = Quality()
    for step in range(4):
        quality.add(seen[step], Dense(dense[step]), following[step])
    flat, other = seen.reshape(-1, 11), dense.reshape(-1, 11)
    kl = torch.nn.functional.kl_div(flat.log_softmax(-1), other.log_softmax(-1), reduction="batchmean", log_target=True)
    assert quality.kl == pytest.approx(float(kl), rel=1e-5)
    assert quality.perplexity == pytest.approx(
        math.exp(torch.nn.functional.cross_entropy(flat, following.reshape(-1))), rel=1e-5
    )
    assert quality.agreement == pytest.approx(float((flat.argmax(-1) == other.argmax(-1)).float().mean()))
    with pytest.raises(NotFinite):
        quality.add(torch.full((3, 11), torch.nan), Dense(dense[0]), following[0])


def test_bandwidth_is_bytes_over_the_shortest_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter(range(10**6))
    # Readings take 1, 3, 5 ... seconds on this clock.
    monkeypatch.setattr(bandwidth.time, "perf_counter", lambda: float(next(readings) ** 2))
    assert bandwidth.memory_bandwidth(CPU, numbers=1 << 14) == 4 * (1 << 14)


def test_the_default_text_is_prose() -> None:
    text = python_reference()
    assert len(text) > 100_000
    assert "***" not in text
    assert "::=" not in text
    assert "The simple form," in text
    words = text.split()
    assert sum(word.strip(".,;:()\"'").isalpha() for word in words) > 0.8 * len(words)


# --- results -------------------------------------------------------------------------------------


def test_result_survives_its_file(result: Bench, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    write(result, path)
    assert read(path) == result
    assert json.loads(path.read_text())["version"] == 1


@pytest.mark.parametrize("part", [Bench, Machine, Request, Context, Measurement])
def test_every_field_is_documented(part: type[BaseModel]) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {field.description} |" for name, field in part.model_fields.items()]
    assert "\n".join(rows) in readme


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "can't be read"),
        ("bench", "no JSON"),
        ('{"version": 1}', "something else"),
        ("[1]", "something else"),
        ('{"kind": "kvrack bench", "version": 2}', "version is 2"),
        ('{"kind": "kvrack bench", "version": 1}', "changed or cut: created"),
    ],
)
def test_other_files_are_refused_in_one_line(content: str | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchFileError, match=words) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_summary_of_steps() -> None:
    each = Measurement(
        cache="x", side="kvrack", made_by="x()", step_seconds=((1.0, 2.0, 3.0), (5.0, 6.0, 7.0)), floor_seconds=1.0
    )
    assert (each.step, each.spread, each.share) == (4.0, (2.0, 6.0), 0.25)


def test_front_is_what_nothing_beats(result: Bench) -> None:
    context = result.contexts[-1]
    assert [(each.side, each.cache) for each in best_choices(context)] == [
        ("kvrack", "hqq:nbits=2"), ("kvrack", "fp8"), ("kvrack", "dynamic"),
    ]  # fmt: skip


def test_kinds_share_colours_and_sides_do_not(result: Bench) -> None:
    looks = looks_of(result)
    assert looks["kvrack", "fp8"].colour == looks["transformers", "fp8"].colour
    assert looks["kvrack", "fp8"].of_line() != looks["transformers", "fp8"].of_line()
    assert len({look.colour for (side, _), look in looks.items() if side == "kvrack"}) == 4


def test_plots_of_all_of_some_and_of_nothing(result: Bench) -> None:
    drawn = figures(result)
    assert tuple(drawn) == PLOTS
    assert png(drawn["front"]).startswith(b"\x89PNG")
    one = result.model_copy(update={"contexts": result.contexts[:1]})
    assert tuple(figures(one)) == PLOTS
    nothing = result.model_copy(update={"contexts": ()})
    assert figures(nothing) == {}
    assert "<img" not in page(nothing, {})


def test_page_is_safe_and_needs_nothing(result: Bench) -> None:
    text = page(result, figures(result))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "http" not in text.replace("http-equiv", "")
    assert text.count("<img") == len(PLOTS)
    for words in ("AMD EPYC", "transformers can&#x27;t", "it broke", "1.50x"):
        assert words in text


def test_table_says_all_of_it(result: Bench) -> None:
    console = Console(file=io.StringIO(), width=140)
    render(result.model_copy(update={"interrupted": True}), console)
    text = console.file.getvalue()
    for words in ("512 tokens of prompt", "30.0 ± ", "1.50x", "it broke", "wasn't measured", "interrupted"):
        assert words in text


def test_comparison_names_what_differs(result: Bench) -> None:
    machine = result.machine.model_copy(update={"threads": 8, "versions": {**result.machine.versions, "torch": "9"}})
    other = result.model_copy(
        update={
            "machine": machine,
            "request": result.request.model_copy(update={"dtype": "bfloat16"}),
            "contexts": result.contexts[1:],
        }
    )
    assert differences(result, result) == []
    assert {name for name, _, _ in differences(result, other)} == {"threads", "torch", "dtype"}
    console = Console(file=io.StringIO(), width=140)
    render_comparison(result, other, (Path("a.json"), Path("b.json")), console)
    text = console.file.getvalue()
    assert "4,096 tokens of prompt" in text
    assert "512 tokens of prompt" not in text
    assert "bfloat16" in text
