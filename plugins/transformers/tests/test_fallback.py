"""kt.generate: the next cache where one runs out of memory."""

import gc
import logging
import weakref

import pytest
import torch
from transformers import GenerationMixin

import kvrack
import kvrack_transformers as kt
from kvrack.placement import Placement

IDS = torch.tensor([[5, 6, 7, 8]])
SETTINGS = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 40, "do_sample": False}
ROOMY = ("dynamic", {"growth": 4.0})


class Quota:
    """What a placement allows: buffers up to a number of bytes, how often it refuses more, and with which error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most = 1 << 40
        self.times = 1000
        self.error = lambda asked: kvrack.MemoryRefused(f"{asked} bytes are over the quota of {self.most}")
        self.held: list[weakref.ref[torch.Tensor]] = []
        self.left_at_refusal: list[int] = []
        allocate = Placement.allocate

        def limited(placement, shape, dtype, device):
            asked = int(torch.Size(shape).numel()) * dtype.itemsize
            if asked > self.most and len(self.left_at_refusal) < self.times:
                self.left_at_refusal.append(sum(each() is not None for each in self.held))
                raise self.error(asked)
            memory = allocate(placement, shape, dtype, device)
            self.held.append(weakref.ref(memory))
            return memory

        monkeypatch.setattr(Placement, "allocate", limited)


@pytest.fixture
def quota(monkeypatch):
    return Quota(monkeypatch)


def test_the_next_name_answers_after_memory_was_freed(llama, quota, caplog):
    expected = llama.generate(IDS, use_cache=False, **SETTINGS)
    # Room for the 20 tokens that are allocated for at first, and once not for all 44.
    quota.most, quota.times = 2 * 16 * 40 * 4, 1
    freed = []

    def watch(self, *arguments, **settings):
        gc.disable()
        freed.append(sum(each() is not None for each in quota.held))
        return original(self, *arguments, **settings)

    original = GenerationMixin.generate
    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", watch)
        got = kt.generate(
            llama, IDS, cache_implementation=ROOMY[0], cache_config=ROOMY[1], fallback=["dynamic"], **SETTINGS
        )
        gc.enable()
    assert torch.equal(got, expected)
    assert freed == [0, 0], "memory of the failed attempt was still held when the next began"
    assert quota.left_at_refusal[0] > 0
    assert "dynamic ran out of memory, its cache holding 10,240 bytes" in caplog.text
    assert "over the quota" in caplog.text
    assert "Trying dynamic" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        lambda asked: torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {asked} bytes"),
        lambda asked: MemoryError(),
        lambda asked: RuntimeError(f"[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried {asked}"),
    ],
    ids=["device", "python", "allocator"],
)
def test_every_kind_of_out_of_memory_is_known(llama, quota, error):
    quota.most, quota.error = 0, error
    with pytest.raises(type(error(0))):
        kt.generate(llama, IDS, cache_implementation="dynamic", fallback=[ROOMY], **SETTINGS)
    assert len(quota.left_at_refusal) == 2


def test_the_last_failure_carries_the_chain(llama, quota):
    quota.most = 0
    with pytest.raises(kvrack.MemoryRefused) as caught:
        kt.generate(llama, IDS, cache_implementation="dynamic", fallback=[ROOMY, "dynamic"], **SETTINGS)
    chain, error = [], caught.value
    while error is not None:
        chain.append(error)
        error = error.__cause__
    assert [type(each) for each in chain] == 3 * [kvrack.MemoryRefused]
    (note,) = caught.value.__notes__
    assert note.count("ran out of memory, its cache holding 0 bytes") == 3


def test_other_errors_pass_through_untouched(llama, quota):
    quota.most, quota.error = 0, lambda asked: RuntimeError("something else")
    with pytest.raises(RuntimeError, match=r"^something else$") as caught:
        kt.generate(llama, IDS, cache_implementation="dynamic", fallback=["dynamic"], **SETTINGS)
    assert len(quota.left_at_refusal) == 1
    assert not hasattr(caught.value, "__notes__")


def test_without_a_name_generates_own_cache_is_first(llama, monkeypatch):
    attempts = []
    original = GenerationMixin.generate

    def fails_once(self, *arguments, **settings):
        attempts.append(settings.get("cache_implementation"))
        if len(attempts) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return original(self, *arguments, **settings)

    expected = llama.generate(IDS, **SETTINGS)
    monkeypatch.setattr(GenerationMixin, "generate", fails_once)
    assert torch.equal(kt.generate(llama, IDS, fallback=["dynamic"], **SETTINGS), expected)
    assert attempts == [None, "dynamic"]


def test_transformers_is_left_as_it_was(llama):
    kt.generate(llama, IDS, cache_implementation="dynamic", **SETTINGS)
    assert not kt.is_enabled()
    kt.enable()
    kt.generate(llama, IDS, cache_implementation="dynamic", **SETTINGS)
    assert kt.is_enabled()
    kt.disable()


def test_fallbacks_are_checked_before_anything_is_generated(llama, quota):
    with pytest.raises(kvrack.InvalidConfig, match="banana"):
        kt.generate(llama, IDS, cache_implementation="dynamic", fallback=[("dynamic", {"banana": 1})], **SETTINGS)
    cache = kt.create_cache(llama, "dynamic")
    with pytest.raises(ValueError, match="a fallback builds its cache anew"):
        kt.generate(llama, IDS, fallback=["dynamic"], past_key_values=cache, **SETTINGS)
    assert not quota.held
