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


def test_weights_that_leave_no_room_are_what_is_said(model_folder: Path) -> None:
    planned = _plan("--model", str(model_folder), "--memory", "1000")
    assert planned["recommendation"] is None
    assert "the weights alone take" in planned["reason"]
    assert {(each["fits"], each["longest"]) for each in planned["plans"]} == {(False, 0)}


def test_dtype_and_batch_scale_what_is_held(model_folder: Path) -> None:
    plain = _plan("--model", str(model_folder), "--context", "64")
    other = _plan("--model", str(model_folder), "--context", "64", "--batch", "6", "--dtype", "bfloat16")
    assert (plain["version"], other["dtype"], other["batch"]) == (1, "bfloat16", 6)
    sizes = [next(one["nbytes"] for one in each["plans"] if one["cache"] == "dynamic") for each in (plain, other)]
    assert sizes[1] == 3 * sizes[0]
    assert other["weights"] == plain["weights"] / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory", "much"], "8GiB"),
        (["--memory", "0"], "above 0"),
        (["--model", "./none"], "no such"),
        (["--model", "none.json"], "no such file"),
        (["--encoder-tokens", "5"], "no encoder"),
        (["--set", "banana=1"], "no installed backend has a key 'banana'"),
    ],
)
def test_what_is_wrong_is_said(model_folder: Path, arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(group, ["plan", "--model", str(model_folder), *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("{}", '"model_type"'),
        ('{"model_type": "banana"}', "banana"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "'many'"),
    ],
)
def test_what_is_wrong_in_a_config_is_said(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    result = CliRunner().invoke(group, ["plan", "--model", str(tmp_path / "config.json")])
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.splitlines()) == 1
