"""``kvrack plan`` for models that need companions, as it is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvrack.commands import kvrack as group
from kvrack.registry import installed

sys.path.insert(0, str(Path(__file__).parent))
from tiny_encoder_decoders import t5, whisper
from tiny_families import STATES

pytestmark = pytest.mark.skipif(
    not {"mamba", "encoder-decoder"} <= set(installed()), reason="the companions are not installed"
)


def _run(folder: Path, config: dict, *arguments: str) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    result = CliRunner().invoke(group, ["plan", "--model", str(folder / "config.json"), *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def _listed(printed: str) -> list[str]:
    """Return the first words of the table's rows."""
    return [row.split()[0] for row in printed.split("\n\n")[1].splitlines()[1:]]


def test_companions_are_no_rows(tmp_path: Path) -> None:
    printed = _run(tmp_path, {"model_type": "bamba", **STATES["bamba"]}, "--context", "64")
    assert "dynamic" in _listed(printed)
    assert not {"mamba", "encoder-decoder"} & set(_listed(printed))
    assert "of each are states, whatever the context" in printed
    assert "Not listed: encoder-decoder (no encoder here)" in printed


def test_where_nothing_attends_all_are_one_row(tmp_path: Path) -> None:
    # A mamba's own config names no longest text, which the tiny one does.
    config = {key: value for key, value in STATES["mamba"].items() if key != "max_position_embeddings"}
    printed = _run(tmp_path, {"model_type": "mamba", **config}, "--memory", "1GiB")
    assert _listed(printed) == ["dynamic"]
    # One that is left by itself needs no word.
    assert ("No layer attends" in printed) == (len(set(installed()) - {"mamba", "encoder-decoder"}) > 1)
    assert printed.split("\n\n")[1].splitlines()[1].split()[-1] == "any"


def test_an_encoders_length_is_counted_and_said(tmp_path: Path) -> None:
    config = t5().config.to_dict()
    short, long = (
        json.loads(_run(tmp_path, config, "--context", "64", "--encoder-tokens", encoded, "--json"))
        for encoded in ("10", "110")
    )
    held = [next(one["nbytes"] for one in each["plans"] if one["cache"] == "dynamic") for each in (short, long)]
    # Three layers of four heads, keys and values of 8 float32; and a prefill's room to grow in neither.
    assert held[1] - held[0] == 100 * 3 * 4 * 2 * 8 * 4
    assert "encoder output of 64 tokens" in _run(tmp_path, config, "--context", "64")


def test_the_positions_of_whispers_encoder_and_decoder_are_known(tmp_path: Path) -> None:
    config = whisper().config
    planned = json.loads(_run(tmp_path, config.to_dict(), "--context", "16", "--json"))
    assert planned["encoder_tokens"] == config.max_source_positions
    assert planned["max_length"] == config.max_target_positions
