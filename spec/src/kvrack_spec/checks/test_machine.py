"""Random sequences of operations, against the oracle."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import kvrack
from kvrack.layer import AttentionLayer
from kvrack_spec.compare import Unchanged, expect_matching, oracle_of, see, tolerance
from kvrack_spec.expect import Broken, expect_equal
from kvrack_spec.oracle import Oracle
from kvrack_spec.subject import Shape, Subject

Answer = TypeVar("Answer")

MOST_TOKENS = 300
MOST_ROWS = 4
LOOK = st.sampled_from([True, True, False])

SETTINGS = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


QUICK = settings(SETTINGS, max_examples=10, phases=(Phase.generate,))


@dataclass(frozen=True)
class Branch:
    """What a fork left aside: a layer, the oracle beside it, its rows, and how often it was cropped."""

    layer: AttentionLayer
    oracle: Oracle
    batch: int
    crops: int


class CacheMachine(RuleBasedStateMachine):
    """One layer, and the oracle beside it. `trace` is the sequence so far, for the report."""

    def __init__(self, subject: Subject, kind: str) -> None:
        super().__init__()
        self.subject = subject
        self.kind = kind
        self.layer: AttentionLayer = subject.layer(kind)
        self.oracle = oracle_of(self.layer)
        self.promised = self.layer.capabilities
        self.batch = 2
        self.given = 0
        self.crops = 0
        self.branches: list[Branch] = []
        self.trace: list[str] = []

    def _say(self, operation: str) -> None:
        self.trace.append(operation)

    @initialize(tokens=st.sampled_from([9, 3, 40]))
    def prefill(self, tokens: int) -> None:
        self.update(tokens)

    def _look(self, look: bool) -> None:
        """See what an operation left, by giving one token more; not after each, so that some meet directly."""
        if look:
            self.update(1)

    @rule(tokens=st.sampled_from([1, 1, 2, 5, 7, 40]))
    def update(self, tokens: int) -> None:
        if self.oracle.length and not self.promised.chunked_prefill:
            tokens = 1
        if self.oracle.length + tokens > MOST_TOKENS:
            return
        self._say(f"update of {tokens}")
        self.given += 1
        keys, values = self.subject.states(tokens, Shape(self.batch), seed=self.given)
        wanted = self.oracle.update(keys, values)
        seen = self._broken_after(lambda: see(self.layer, keys, values))
        allowed = tolerance(self.layer, keys.dtype, 1.0 + self.crops)
        scales = self.oracle.key_scale, self.oracle.value_scale
        self._broken_after(lambda: expect_matching(seen, *wanted, allowed, *scales))

    @rule(tokens=st.integers(1, 12), look=LOOK)
    def crop(self, tokens: int, look: bool) -> None:
        self._say(f"crop(-{tokens})")
        try:
            self.layer.check_crop(-tokens)
        except kvrack.UnsupportedOperation:
            with Unchanged(self.layer, f"a refused crop(-{tokens})"):
                try:
                    self.layer.crop(-tokens)
                except kvrack.UnsupportedOperation:
                    self.trace[-1] += " refused"
            return
        self._broken_after(lambda: self.layer.crop(-tokens))
        self.oracle.crop(-tokens)
        self.crops += 1
        self._look(look)

    @precondition(lambda self: self.promised.records_past)
    @rule()
    def record(self) -> None:
        self._say("activate_past_recording()")
        self.layer.activate_past_recording()

    @rule(data=st.data(), look=LOOK)
    def reorder(self, data: st.DataObject, look: bool) -> None:
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=self.batch, max_size=self.batch))
        self._say(f"reorder_cache({rows})")
        index = torch.tensor(rows, device=self.subject.device)
        self._broken_after(lambda: self.layer.reorder_cache(index))
        self.oracle.pick_rows(index)
        self._look(look)

    @precondition(lambda self: 2 * self.batch <= MOST_ROWS)
    @rule(look=LOOK)
    def repeat(self, look: bool) -> None:
        self._say("batch_repeat_interleave(2)")
        self._broken_after(lambda: self.layer.batch_repeat_interleave(2))
        self.oracle.pick_rows(torch.arange(self.batch, device=self.subject.device).repeat_interleave(2))
        self.batch *= 2
        self._look(look)

    @precondition(lambda self: self.batch > 1)
    @rule(data=st.data(), look=LOOK)
    def select(self, data: st.DataObject, look: bool) -> None:
        rows = data.draw(st.lists(st.integers(0, self.batch - 1), min_size=1, max_size=self.batch - 1, unique=True))
        self._say(f"batch_select_indices({rows})")
        index = torch.tensor(rows, device=self.subject.device)
        self._broken_after(lambda: self.layer.batch_select_indices(index))
        self.oracle.pick_rows(index)
        self.batch = len(rows)
        self._look(look)

    @rule(batch=st.integers(1, 3), look=LOOK)
    def reset(self, batch: int, look: bool) -> None:
        self._say(f"reset(), {batch} rows next")
        self._broken_after(self.layer.reset)
        self.oracle.reset()
        self.batch = batch
        self.crops = 0
        self._look(look)

    @rule(keep_copy=st.booleans(), look=LOOK)
    def copy(self, keep_copy: bool, look: bool) -> None:
        self._say(f"deepcopy, going on with the {'copy' if keep_copy else 'original'}")
        twin = self._broken_after(lambda: copy.deepcopy(self.layer))
        other, self.layer = (self.layer, twin) if keep_copy else (twin, self.layer)
        # What is done to the other one must not show in this one.
        other.update(*self.subject.states(1, Shape(self.batch), seed=9999))
        other.reset()
        self._look(look)

    @rule(go_on=st.booleans(), look=LOOK)
    def fork(self, go_on: bool, look: bool) -> None:
        """Branch, go on with either, and keep the other to come back to."""
        self._say(f"fork, going on with the {'fork' if go_on else 'original'}")
        forked = self._broken_after(self._cache().fork).layers[0]
        assert isinstance(forked, AttentionLayer)
        kept, self.layer = (self.layer, forked) if go_on else (forked, self.layer)
        self.branches = [*self.branches[-2:], Branch(kept, self.oracle.copy(), self.batch, self.crops)]
        if look:
            self.update(1)
            for _ in range(2):
                self._go_to(len(self.branches) - 1)
                self.update(1)

    @precondition(lambda self: self.branches)
    @rule(data=st.data(), look=LOOK)
    def switch(self, data: st.DataObject, look: bool) -> None:
        self._go_to(data.draw(st.integers(0, len(self.branches) - 1)))
        self._look(look)

    def _go_to(self, index: int) -> None:
        """Go on with the branch of this index, and leave the present one in its place."""
        self._say(f"going on with branch {index}")
        found = self.branches[index]
        self.branches[index] = Branch(self.layer, self.oracle, self.batch, self.crops)
        self.layer, self.oracle, self.batch, self.crops = found.layer, found.oracle, found.batch, found.crops

    @rule(look=LOOK)
    def save_and_load(self, look: bool) -> None:
        self._say("save and load")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            self._broken_after(lambda: self._cache().save(path))
            loaded = self._broken_after(lambda: kvrack.load(path, self.subject.device)).layers[0]
        assert isinstance(loaded, AttentionLayer)
        self.layer = loaded
        self._look(look)

    @precondition(lambda self: self.promised.offloads)
    @rule(look=LOOK)
    def offload_and_prefetch(self, look: bool) -> None:
        self._say("offload() and prefetch()")
        self._broken_after(self.layer.offload)
        self._broken_after(self.layer.prefetch)
        self._look(look)

    @invariant()
    def length_is_the_oracles(self) -> None:
        self._broken_after(lambda: expect_equal(self.layer.get_seq_length(), self.oracle.length, "get_seq_length()"))

    def _cache(self) -> kvrack.Cache:
        """Return a cache of the layer."""
        cache = self.subject.cache(self.layer.spec)
        cache.layers[0] = self.layer
        return cache

    def _broken_after(self, call: Callable[[], Answer]) -> Answer:
        """Call, and say in what breaks after which operations it did."""
        try:
            return call()
        except Broken as error:
            raise Broken(error.expected, f"{error.seen}\n          after {', '.join(self.trace)}") from None
        except Exception as error:
            raise Broken(
                "every operation to work", f"{type(error).__name__}: {error}\n          after {', '.join(self.trace)}"
            ) from error


@pytest.mark.rule("L29")
def test_any_sequence_is_as_on_a_concatenation(subject: Subject, kind: str) -> None:
    class Machine(CacheMachine):
        def __init__(self) -> None:
            super().__init__(subject, kind)

    run_state_machine_as_test(Machine, settings=QUICK if subject.quick else SETTINGS)
