"""``kvrack chat``, with a tiny model: lines from a pipe, commands among them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner, Result

import kvrack
from kvrack.commands import kvrack as group

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role[0] }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>a:{% endif %}"
)
TOOK = re.compile(r"^\[(\d+) tokens known(?:, (\d+) gone back)?, (\d+) fed, (\d+) new, \S+ tokens/s, .+\]$", re.M)


@pytest.fixture(scope="module")
def talker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    folder = tmp_path_factory.mktemp("talker")
    transformers.AutoModelForCausalLM.from_pretrained(model_folder).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def chat(folder: Path, *lines: str, options: tuple[str, ...] = ()) -> Result:
    arguments = ["chat", "--model", str(folder), "--max-new-tokens", "5", *options]
    result = CliRunner().invoke(group, arguments, prog_name="kvrack", input="\n".join(lines) + "\n")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def test_each_line_is_answered_and_only_news_is_fed(talker):
    result = chat(talker, "Hi", "", "Ho")
    assert result.exit_code == 0, result.output
    first, second = TOOK.findall(result.output)
    assert (first[0], first[3]) == ("0", "5")
    assert int(second[0]) > 0
    assert int(second[2]) < int(first[2]) + 12


def test_commands(talker, tmp_path):
    path = tmp_path / "talk.kv"
    result = chat(talker, "Hi", "/memory", f"/save {path}", "/undo", "/undo", f"/load {path}", "/help", "/quit", "Ho")
    assert result.exit_code == 0, result.output
    assert len(TOOK.findall(result.output)) == 1
    seen = kvrack.describe(path).token_ids
    for line in (
        rf"all +[\d,]+ *\n{len(seen)} tokens seen, 2 messages",
        rf"saved {len(seen)} tokens to ",
        "taken back; 0 messages are left",
        "there is nothing to take back",
        rf"loaded 2 messages, {len(seen)} tokens from ",
        r"/undo +take the last message and its answer back",
    ):
        assert re.search(line, result.output), line
    again = chat(talker, "Ho", options=("--load", str(path)))
    (took,) = TOOK.findall(again.output)
    assert int(took[0]) > 0


def test_what_cannot_be_done_is_said_and_the_talk_goes_on(talker, tmp_path):
    foreign = tmp_path / "notes.txt"
    foreign.write_text("no cache at all")
    result = chat(talker, "/banana", "/save", f"/load {tmp_path / 'absent'}", f"/load {foreign}", "x" * 200, "Hi")
    assert result.exit_code == 0, result.output
    for line in (
        "not done: no command /banana. There are: /save, /load, /undo, /memory, /help, /quit",
        "not done: /save: expected a file, as in /save talk.kv",
        "not done: no cache file at ",
        "is not a safetensors file",
        "tokens long, the model takes 96",
    ):
        assert line in result.stderr
    assert len(TOOK.findall(result.output)) == 1


def test_what_cannot_be_talked_with_is_refused_before_the_first_line(model_folder, talker):
    result = chat(model_folder, "Hi")
    assert result.exit_code != 0
    assert "can't be talked with: Chat: the tokenizer has no chat template" in result.output
    result = chat(talker, "Hi", options=("--cache", "banana"))
    assert result.exit_code != 0
    assert "unknown cache backend 'banana'" in result.output
