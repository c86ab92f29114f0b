"""``kvrack plan``, on configs alone."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import kvrack_transformers as kt
from kvrack.commands import kvrack as group


def _plan(*arguments: str) -> dict:
    result = CliRunner().invoke(group, ["plan", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_prediction_is_what_a_model_run_leaves(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    planned = _plan("--model", str(model_folder / "config.json"), "--context", "64")
    dynamic = next(each for each in planned["plans"] if each["cache"] == "dynamic")
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    cache = kt.create_cache(model, "dynamic", max_length=64)
    with torch.no_grad():
        model(torch.ones(1, 63, dtype=torch.long), past_key_values=cache)
        model(torch.ones(1, 1, dtype=torch.long), past_key_values=cache)
    assert dynamic["nbytes"] == cache.nbytes
    assert planned["weights"] == sum(each.numel() * 4 for each in model.parameters())


def test_longest_context_fits_and_one_more_token_in_a_thousand_does_not(model_folder: Path) -> None:
    weights = _plan("--model", str(model_folder))["weights"]
    # Two layers, two heads, keys and values of 16 float32: 512 bytes a token.
    planned = _plan("--model", str(model_folder), "--context", "60", "--memory", str(weights + 512 * 50))
    dynamic = next(each for each in planned["plans"] if each["cache"] == "dynamic")
    assert not dynamic["fits"]
    assert dynamic["longest"] == 50
    assert planned["recommendation"] != "dynamic"


def test_memory_takes_units(model_folder: Path) -> None:
    assert _plan("--model", str(model_folder), "--memory", "1.5GiB")["memory"] == 3 << 29
    assert _plan("--model", str(model_folder), "--memory", "500MB")["memory"] == 500_000_000


@pytest.mark.parametrize(("arguments", "words"), [(["--memory", "much"], "8GiB"), (["--model", "./none"], "no such")])
def test_what_is_wrong_is_said(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(group, ["plan", *arguments])
    assert result.exit_code == 2
    assert words in result.output
