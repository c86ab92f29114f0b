"""Real English, as tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvrack import KvrackError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

DEFAULT_TEXT = "the Python reference (pydoc_data.topics)"

RULE = re.compile(r"^\W+$")
GRAMMAR = re.compile(r"::=|^\s*\|")


def read_text(file: Path | None) -> tuple[str, str]:
    """Return a text and what it is called: that of `file`, by default the prose of the Python reference."""
    if file is None:
        return python_reference(), DEFAULT_TEXT
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeError as error:
        raise click.UsageError(f"--text: {file} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise click.UsageError(f"--text: {file} can't be read: {error.strerror or error}") from error
    return text, file.name


def python_reference() -> str:
    """Return the prose of the manual that comes with Python: no ruled lines, no grammar, no code.

    Raises KvrackError where a system's Python was packaged without it.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise KvrackError("this Python comes without its reference (pydoc_data), so bench needs a --text") from error

    paragraphs = (
        paragraph for name in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[name]) if _is_prose(paragraph)
    )
    return "\n\n".join(
        " ".join(" ".join(line for line in paragraph.splitlines() if not RULE.match(line)).split())
        for paragraph in paragraphs
    )


def _is_prose(paragraph: str) -> bool:
    lines = [line for line in paragraph.splitlines() if line.strip() and not RULE.match(line)]
    if not lines or any(GRAMMAR.search(line) or ">>>" in line for line in lines):
        return False
    # Sentences are flush left or a list's item; what is indented by itself is code.
    return sum(line.startswith("   ") for line in lines) * 2 < len(lines) and len(" ".join(lines).split()) >= 8


def tokens_of(
    tokenizer: PreTrainedTokenizerBase, text: str, name: str, rows: int, length: int, vocabulary: int
) -> torch.Tensor:
    """Return ``[rows, length]`` tokens, each row the part of the text after the row before.

    Raises KvrackError where the text is too short, or where the model doesn't know its tokenizer's tokens.
    """
    import torch

    needed = rows * length
    # A token is seldom more than 8 characters of a text; if it was, more of it is taken.
    given, ids = 8 * needed, torch.empty(1, 0, dtype=torch.long)
    while ids.shape[1] < needed:
        ids = tokenizer(text[:given], return_tensors="pt", add_special_tokens=False)["input_ids"]
        if given >= len(text) and ids.shape[1] < needed:
            raise KvrackError(
                f"{name} has {ids.shape[1]:,} tokens, and {rows} rows of {length:,} are needed. "
                "Give a longer --text, a smaller --batch or a shorter --context"
            )
        given *= 2
    ids = ids[0, :needed].reshape(rows, length)
    if int(ids.max()) >= vocabulary:
        raise KvrackError(f"the tokenizer gives token {int(ids.max())}, and the model has {vocabulary} of them")
    return ids
