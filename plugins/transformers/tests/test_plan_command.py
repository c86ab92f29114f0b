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


def test_longest_context_without_a_limit_goes_on_in_a_straight_line(tmp_path: Path) -> None:
    pytest.importorskip("kvrack_encoder_decoder", reason="a T5 needs it: pip install kvrack-encoder-decoder")
    # One layer of one head, keys and values of 8 float32: 64 bytes a token, and as many for the encoder's 64.
    config = {
        "model_type": "t5", "is_encoder_decoder": True, "num_layers": 1, "num_heads": 1, "vocab_size": 64,
        "d_kv": 8, "d_model": 8, "d_ff": 8,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    common = ("--model", str(tmp_path), "--context", "64")
    weights = _plan(*common)["weights"]
    for tokens, expected in ((1 << 20, 1 << 20), (1 << 30, 1 << 24)):
        planned = _plan(*common, "--memory", str(weights + 64 * (tokens + 64)))
        assert next(each["longest"] for each in planned["plans"] if each["cache"] == "dynamic") == expected


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
        ("{", "expected JSON in"),
        ("{}", '"model_type"'),
        ('{"model_type": "llamma"}', "knows no model type 'llamma'; it may need a newer one. Did you mean 'llama'?"),
        ('{"model_type": "banana", "auto_map": {}}', "may need code of its own"),
        ('{"model_type": "llama", "num_hidden_layers": "many"}', "'many'"),
    ],
)
def test_what_is_wrong_in_a_config_is_said(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for model in (tmp_path, tmp_path / "config.json"):
        result = CliRunner().invoke(group, ["plan", "--model", str(model)])
        assert result.exit_code == 2
        assert words in result.output
        assert len(result.output.splitlines()) == 1
