"""All caches after a prompt of one length: each holds its own tokens, and they decode in turn, step by step."""

from __future__ import annotations

import functools
import gc
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kvrack import KvrackError
from kvrack_transformers.bench import theirs
from kvrack_transformers.bench.allocations import PeakBytes
from kvrack_transformers.bench.bandwidth import memory_bandwidth, wait_for
from kvrack_transformers.bench.entries import Entry, one_line
from kvrack_transformers.bench.quality import Dense, Quality
from kvrack_transformers.bench.results import Context, Measurement, Side
from kvrack_transformers.versions import cache_argument

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHORT = 2.0
"""Seconds below which a prefill is repeated, as often as the steps are."""
STEP_COST = 24
"""Tokens of a prefill that take about as long as one decode step; only the time left is reckoned with it."""

Advance = Callable[[str, int], None]
"""Called with what was done and what it cost, in tokens of a prefill."""


@dataclass(frozen=True)
class Plan:
    """What is measured of each cache.

    Attributes:
        context: tokens of the prompt.
        new_tokens: tokens that each repeat decodes.
        repeats: timed repeats, after one that warms up.
        attention: the attention implementation that kvrack's caches are read by; None for the model's own.
    """

    context: int
    new_tokens: int
    repeats: int
    attention: str | None = None

    @property
    def decoded(self) -> int:
        """Tokens decoded of each cache."""
        return self.new_tokens * (self.repeats + 1)

    @property
    def held(self) -> int:
        """Tokens held at the end."""
        return self.context + self.decoded

    @property
    def length(self) -> int:
        """Tokens of text needed: the last one is foretold and not given."""
        return self.held + 1

    def cost(self, entries: int) -> int:
        """Tokens of a prefill that all of it takes about as long as."""
        return (2 * entries + 1) * self.context + entries * self.decoded * STEP_COST


@dataclass
class Runner:
    """One cache at work."""

    entry: Entry
    cache: Any = None
    tracker: PeakBytes | None = None
    prefills: list[float] = field(default_factory=list)
    steps: list[list[float]] = field(default_factory=list)
    quality: Quality = field(default_factory=Quality)
    prefill_peak: int | None = None
    decode_peak: int | None = None
    logits: torch.Tensor | None = None
    moved: tuple[int, int] | None = None
    moving_steps: int = 0
    stored: tuple[dict[str, int], int | None] | None = None
    error: str | None = None

    @property
    def is_running(self) -> bool:
        return self.error is None

    def fail(self, error: Exception) -> None:
        """Note why there is no more of this cache, and give up its memory."""
        self.error = one_line(error)
        self.cache = self.logits = self.tracker = None


class ContextRun:
    """The measuring of all caches after one prompt. What is done so far can be read at any time.

    Args:
        model: on its device.
        tokens: the text, ``[rows, plan.length]``.
        entries: the caches, the dense reference first.
        plan: what is measured.
        weight_bytes: bytes of weights that a step reads.
        advance: told what was done.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokens: torch.Tensor,
        entries: Sequence[Entry],
        plan: Plan,
        weight_bytes: int,
        advance: Advance,
    ) -> None:
        self.model: Any = model
        self.tokens = tokens.to(model.device)
        self.plan = plan
        self.runners = [Runner(entry) for entry in entries]
        self._weight_bytes = weight_bytes
        self._advance = advance
        self._bandwidth: float | None = None
        self._argument = cache_argument(model)
        self._config: Any = model.config.get_text_config()
        own = self._config._attn_implementation
        self._attention: dict[Side, str] = {"transformers": own, "kvrack": plan.attention or own}
        self._last_only = (
            {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
        )

    # --- measuring ------------------------------------------------------------------------------

    @torch.no_grad()
    def run(self) -> None:
        """Measure. A cache that fails is left out from there on; an interruption passes through."""
        try:
            seconds = self._warm_up()
            for _ in range(self.plan.repeats if seconds < SHORT else 1):
                for runner in self.runners:
                    self._attempt(runner, self._time_prefill)
            for runner in self.runners:
                self._attempt(runner, self._fill)
            gc.collect()
            self._bandwidth = memory_bandwidth(self.model.device)
            for repeat in range(self.plan.repeats + 1):
                self._repeat(repeat)
        finally:
            self._config._attn_implementation = self._attention["transformers"]
            for runner in self.runners:
                self._read_off(runner)
                runner.cache = runner.logits = runner.tracker = None

    def _warm_up(self) -> float:
        """Run the prompt once, uncounted, so that the first cache isn't the one that finds everything cold."""
        start = time.perf_counter()
        cache = theirs.reference().make(self.model, self.plan.held)
        self._forward(self.tokens[:, : self.plan.context], cache, "transformers")
        self._advance(f"{self.plan.context:,} tokens: warming up", self.plan.context)
        return time.perf_counter() - start

    def _attempt(self, runner: Runner, what: Callable[[Runner], None]) -> None:
        if not runner.is_running:
            return
        try:
            what(runner)
        except Exception as error:
            # Whatever one cache raises, the others are still measured.
            runner.fail(error)
            if runner is self.runners[0]:
                raise KvrackError(f"the dense cache, which others are compared with: {runner.error}") from error

    def _time_prefill(self, runner: Runner) -> None:
        """Run the prompt into a cache that is given up; watching its memory would take time."""
        again = bool(runner.prefills)
        cache = runner.entry.make(self.model, self.plan.held)
        wait_for(self.model.device)
        start = time.perf_counter()
        self._forward(self.tokens[:, : self.plan.context], cache, runner.entry.side)
        wait_for(self.model.device)
        runner.prefills.append(time.perf_counter() - start)
        self._advance(
            f"{self.plan.context:,} tokens: prompt into {runner.entry.label}",
            0 if again else self.plan.context,
        )

    def _fill(self, runner: Runner) -> None:
        """Run the prompt into the cache that decodes then, and watch memory."""
        runner.tracker = PeakBytes([*self.model.parameters(), *self.model.buffers(), self.tokens])
        with runner.tracker:
            runner.cache = runner.entry.make(self.model, self.plan.held)
            self._forward(self.tokens[:, : self.plan.context], runner.cache, runner.entry.side)
        runner.prefill_peak = runner.tracker.peak
        self._advance(
            f"{self.plan.context:,} tokens: watching memory, {runner.entry.label}",
            self.plan.context,
        )

    def _repeat(self, repeat: int) -> None:
        """Decode the repeat's tokens; the first repeat warms up, its memory is watched and its time isn't."""
        timed = repeat > 0
        for runner in self.runners:
            if runner.is_running:
                if timed:
                    runner.steps.append([])
                elif runner.tracker is not None:
                    runner.tracker.peak = runner.tracker.now
                runner.moved = _moved(runner.cache) if timed and runner.moved is None else runner.moved
        name = f"repeat {repeat} of {self.plan.repeats}" if timed else "warming up"
        for i in range(self.plan.new_tokens):
            position = self.plan.context + repeat * self.plan.new_tokens + i
            # To and fro, so that no cache always comes after the same one.
            for runner in self.runners[:: -1 if i % 2 else 1]:
                self._attempt(runner, functools.partial(self._step, position=position, timed=timed))
            self._compare(position)
            running = sum(runner.is_running for runner in self.runners)
            self._advance(f"{self.plan.context:,} tokens: decoding, {name}", STEP_COST * running)

    def _step(self, runner: Runner, position: int, timed: bool) -> None:
        token = self.tokens[:, position : position + 1]
        if not timed and runner.tracker is not None:
            with runner.tracker:
                logits = self._forward(token, runner.cache, runner.entry.side)
            runner.decode_peak = runner.tracker.peak
        else:
            wait_for(self.model.device)
            start = time.perf_counter()
            logits = self._forward(token, runner.cache, runner.entry.side)
            wait_for(self.model.device)
            runner.steps[-1].append(time.perf_counter() - start)
            runner.moving_steps += 1
        runner.logits = logits[:, -1]

    def _forward(self, tokens: torch.Tensor, cache: Any, side: Side) -> torch.Tensor:
        # Models look it up at each step; setting it through the model would check it anew each time.
        self._config._attn_implementation = self._attention[side]
        logits: torch.Tensor = self.model(tokens, use_cache=True, **{self._argument: cache}, **self._last_only).logits
        return logits

    def _compare(self, position: int) -> None:
        """Compare the answers of one step, outside of what is timed."""
        dense_logits, following = self.runners[0].logits, self.tokens[:, position + 1]
        assert dense_logits is not None
        dense = Dense(dense_logits)
        for runner in self.runners:
            logits, runner.logits = runner.logits, None
            if logits is not None:
                self._attempt(runner, functools.partial(_judge, logits=logits, dense=dense, following=following))

    # --- what was found -------------------------------------------------------------------------

    def _read_off(self, runner: Runner) -> None:
        if runner.cache is None or not runner.prefills:
            return
        try:
            runner.stored = _stored(runner.cache)
            before, after = runner.moved, _moved(runner.cache)
            runner.moved = None if before is None or after is None else (after[0] - before[0], after[1] - before[1])
        except Exception as error:
            runner.fail(error)

    def context(self) -> Context:
        """Return what is known so far."""
        return Context(
            tokens=self.plan.context,
            held=self.plan.held,
            bandwidth=self._bandwidth,
            measurements=tuple(self._measurement(runner) for runner in self.runners if runner.prefills or runner.error),
        )

    def _measurement(self, runner: Runner) -> Measurement:
        places, scratch = runner.stored if runner.stored is not None else ({}, None)
        stored = sum(places.values()) if runner.stored is not None else None
        floor = None
        dense = self.runners[0].stored
        if stored is not None and dense is not None and self._bandwidth is not None:
            # Room for tokens to come needn't be read, and the dense cache has none.
            floor = (self._weight_bytes + min(stored, sum(dense[0].values()))) / self._bandwidth
        peaks = [each for each in (runner.prefill_peak, runner.decode_peak) if each is not None]
        moved = runner.moved if runner.stored is not None and runner.moving_steps else None
        return Measurement(
            cache=runner.entry.cache,
            side=runner.entry.side,
            made_by=runner.entry.made_by,
            error=runner.error,
            prefill_seconds=tuple(runner.prefills),
            step_seconds=tuple(tuple(each) for each in runner.steps if each),
            stored_bytes=stored,
            stored_by_place=places,
            scratch_bytes=scratch,
            peak_bytes=max(peaks) if peaks else None,
            peak_decode_bytes=runner.decode_peak,
            perplexity=runner.quality.perplexity,
            kl=runner.quality.kl,
            agreement=runner.quality.agreement,
            floor_seconds=floor,
            moved_in=moved[0] / runner.moving_steps if moved else None,
            moved_out=moved[1] / runner.moving_steps if moved else None,
        )


def _judge(runner: Runner, logits: torch.Tensor, dense: Dense, following: torch.Tensor) -> None:
    runner.quality.add(logits, dense, following)


def _stored(cache: Any) -> tuple[dict[str, int], int | None]:
    """Return the bytes that keep tokens, by place, and kvrack's scratch."""
    if not hasattr(cache, "memory"):
        return theirs.stored_by_place(cache), None
    places: dict[str, int] = {}
    scratch = 0
    for row in cache.memory():
        if row.role.startswith("scratch"):
            scratch += row.nbytes
        else:
            places[row.device] = places.get(row.device, 0) + row.nbytes
    return places, scratch


def _moved(cache: Any) -> tuple[int, int] | None:
    """Return the bytes that the layers of a cache moved here and away so far; None where none can."""
    rack = getattr(cache, "rack", None)
    counts = {id(traffic): traffic for layer in rack or () if (traffic := getattr(layer, "traffic", None)) is not None}
    if not counts:
        return None
    return sum(each.back for each in counts.values()), sum(each.out for each in counts.values())
