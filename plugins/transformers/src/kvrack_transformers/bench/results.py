"""What a benchmark found: the versioned content of ``bench.json``."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvrack import KvrackError

KIND = "kvrack bench"
VERSION = 1
"""Raised when a reader of the version before would misread what is written."""

EXACT = 1e-6
"""Divergence, in nats, below which only the order of additions differs."""

Side = Literal["kvrack", "transformers"]
SIDES: tuple[Side, ...] = ("kvrack", "transformers")


def label(side: Side, cache: str) -> str:
    """Return a cache's name for a reader, with whose it is where it isn't kvrack's."""
    return cache if side == "kvrack" else f"transformers {cache}"


class BenchFileError(KvrackError):
    """A file is no result of ``kvrack bench`` that this release reads."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        super().__init__(f"{path}: {reason}")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Machine(_Part):
    """Where it was measured."""

    processor: str = Field(description="name of the processor")
    cores: int = Field(description="logical processors that the process may use")
    memory: int = Field(description="bytes of memory, 0 where the system doesn't say")
    system: str = Field(description="operating system and architecture")
    device: str = Field(description="torch device that the model ran on, an accelerator with its name")
    threads: int = Field(description="torch's threads")
    versions: dict[str, str] = Field(description="releases of Python and of the distributions that took part")


class Request(_Part):
    """What was asked for."""

    model: str = Field(description="as given to --model")
    parameters: int = Field(description="numbers in the model's weights")
    weight_bytes: int = Field(description="bytes of weights that a decode step reads")
    dtype: str = Field(description="of weights, keys and values")
    attention: str = Field(description="the model's attention implementation in transformers")
    kvrack_attention: str = Field(description="the one that reads kvrack's caches")
    caches: tuple[str, ...] = Field(description="as given to --cache, 'all' spelled out")
    contexts: tuple[int, ...] = Field(description="tokens of each prompt")
    new_tokens: int = Field(description="tokens that each repeat decodes")
    repeats: int = Field(description="timed repeats, after one that warms up")
    batch: int = Field(description="rows, each with a text of its own")
    against: str | None = Field(description="'transformers', or null")
    text: str = Field(description="the text that the tokens come from")


class Measurement(_Part):
    """One cache after one prompt. What wasn't reached is null."""

    cache: str = Field(description="name and settings, as given to --cache")
    side: Side = Field(description="whose implementation")
    made_by: str = Field(description="the call that made the cache")
    error: str | None = Field(default=None, description="why it wasn't measured to the end")
    prefill_seconds: tuple[float, ...] = Field(default=(), description="seconds that the prompt took, each time")
    step_seconds: tuple[tuple[float, ...], ...] = Field(
        default=(), description="seconds of each decode step, a list for each timed repeat"
    )
    stored_bytes: int | None = Field(
        default=None, description="bytes that keep the tokens at the end, room for more included, scratch not"
    )
    stored_by_place: dict[str, int] = Field(default={}, description="the same by device; 'disk' for a file")
    scratch_bytes: int | None = Field(default=None, description="bytes that are only used within a step; kvrack's only")
    peak_bytes: int | None = Field(
        default=None, description="most bytes of tensors alive at once that prefill or decode allocated; no weights"
    )
    peak_decode_bytes: int | None = Field(default=None, description="the same over the decode steps that warm up")
    perplexity: float | None = Field(default=None, description="of the text's tokens, teacher-forced")
    kl: float | None = Field(
        default=None, description="mean KL divergence of the next token from the dense cache's, nats"
    )
    agreement: float | None = Field(default=None, description="share of steps whose likeliest token is the dense one's")
    floor_seconds: float | None = Field(
        default=None,
        description="a decode step at the measured bandwidth: weight_bytes and stored_bytes (of the dense cache, where "
        "that is less) over bandwidth",
    )
    moved_in: float | None = Field(default=None, description="bytes a step brought back from elsewhere, where any")
    moved_out: float | None = Field(default=None, description="bytes a step moved elsewhere, where any")

    @property
    def label(self) -> str:
        """Name for a reader, with whose it is where it isn't kvrack's."""
        return label(self.side, self.cache)

    @property
    def key(self) -> tuple[Side, str]:
        return self.side, self.cache

    @property
    def prefill(self) -> float | None:
        """Median seconds of the prompt."""
        return statistics.median(self.prefill_seconds) if self.prefill_seconds else None

    @property
    def steps(self) -> tuple[float, ...]:
        """Seconds of all decode steps."""
        return tuple(seconds for repeat in self.step_seconds for seconds in repeat)

    @property
    def step(self) -> float | None:
        """Median seconds of a decode step."""
        return statistics.median(self.steps) if self.steps else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """Smallest and largest of the repeats' medians."""
        medians = [statistics.median(repeat) for repeat in self.step_seconds if repeat]
        return (min(medians), max(medians)) if medians else None

    @property
    def is_exact(self) -> bool:
        """Whether its answers are the dense cache's, rounding apart."""
        return self.kl is not None and self.kl < EXACT

    @property
    def share(self) -> float | None:
        """Share of the floor's speed that is reached."""
        return self.floor_seconds / self.step if self.floor_seconds is not None and self.step else None


class Context(_Part):
    """All caches after prompts of one length."""

    tokens: int = Field(description="tokens of the prompt")
    held: int = Field(description="tokens of a row that a cache holds at the end")
    bandwidth: float | None = Field(
        default=None, description="memory bandwidth measured before decoding, bytes a second"
    )
    measurements: tuple[Measurement, ...] = Field(description="one for each cache, the dense reference first")

    @property
    def reference(self) -> Measurement | None:
        """The dense cache that the others are compared with."""
        return self.find(("transformers", "dynamic"))

    def find(self, key: tuple[Side, str]) -> Measurement | None:
        """Return the measurement of one cache, None where there is none."""
        return next((each for each in self.measurements if each.key == key), None)

    def pairs(self) -> Iterator[tuple[Measurement, Measurement | None]]:
        """Yield each of kvrack's caches and transformers' of the same kind."""
        for each in self.measurements:
            if each.side == "kvrack":
                growable = each.cache.partition(":")[0] == "dynamic"
                yield each, self.reference if growable else self.find(("transformers", each.cache))


class Bench(_Part):
    """A benchmark's result, as ``bench.json`` holds it."""

    kind: Literal["kvrack bench"] = Field(default="kvrack bench", description="'kvrack bench'")
    version: Literal[1] = Field(default=1, description="of this description: 1")
    created: str = Field(description="when it began, ISO 8601 with UTC offset")
    machine: Machine = Field(description="where it was measured, see below")
    request: Request = Field(description="what was asked for, see below")
    contexts: tuple[Context, ...] = Field(description="what was found for each length of prompt, see below")
    left_out: dict[str, str] = Field(default={}, description="caches that weren't tried, with the reason")
    interrupted: bool = Field(default=False, description="whether it was stopped before its end")

    @property
    def keys(self) -> list[tuple[Side, str]]:
        """Each cache once, in the order measured."""
        return list(dict.fromkeys(each.key for context in self.contexts for each in context.measurements))


def write(bench: Bench, path: Path) -> None:
    """Write a result as JSON."""
    path.write_text(bench.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Bench:
    """Return the result that a file holds. Raises BenchFileError, in one line, for anything else."""
    from pydantic_core import from_json

    try:
        content = from_json(path.read_bytes())
    except OSError as error:
        raise BenchFileError(path, f"it can't be read: {error.strerror or error}") from error
    except ValueError as error:
        raise BenchFileError(path, f"expected the bench.json of kvrack bench, and it is no JSON: {error}") from error
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind != KIND:
        raise BenchFileError(path, "expected the bench.json of kvrack bench, and this JSON is something else")
    if content.get("version") != VERSION:
        raise BenchFileError(
            path,
            f"its version is {content.get('version')!r}, and this release reads version {VERSION}. Run the benchmark "
            "anew, or compare with the release that wrote it",
        )
    try:
        return Bench.model_validate(content, strict=False)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BenchFileError(
            path, f"it was changed or cut: {where}: {first['msg']} ({error.error_count()} faults)"
        ) from error
