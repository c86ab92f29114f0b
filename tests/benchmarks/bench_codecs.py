"""What codecs cost and give on SmolLM2-135M-Instruct, next to transformers' QuantizedCache in the same run.

    python tests/benchmarks/bench_codecs.py quality [--only "hqq 4"] [--prompt 2048] [--steps 160]
    python tests/benchmarks/bench_codecs.py memory | peak | encoding
    python tests/benchmarks/bench_codecs.py speed [--dtype bfloat16] [--held 4096] [--repeats 9] [--attention kvrack]

- quality: mean KL divergence from a dense cache, over teacher-forced steps on English text;
- memory: bytes that a cache of bfloat16 states holds at 2,048 and 8,192 tokens, its tail and scales
  included and its scratch apart, by the bytes that a dense cache holds;
- peak: the most bytes allocated over a prompt of 2,048 and 512 single tokens, scratch included;
- speed: a decode step of the whole model, caches in turn, so that drift of the machine hits all; transformers' own
  always attend by "sdpa";
- encoding: time to encode, by token, at several numbers of tokens held.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Callable

import torch
from codec_quality import THEIRS, caches, reference, smollm2
from transformers import DynamicCache, PreTrainedModel, QuantizedCache
from transformers.cache_utils import Cache

import kvrack
import kvrack_transformers as kt
from kvrack.encoded import EncodedLayer
from kvrack_transformers.bench.allocations import PeakBytes
from kvrack_transformers.versions import CACHE_ARGUMENT

LAYERS, HEADS, HEAD_DIM = 30, 3, 64
CODECS: dict[str, tuple[str, dict[str, object]]] = {
    "fp8": ("fp8", {}),
    "hqq 8": ("hqq", {"nbits": 8}),
    "hqq 4": ("hqq", {}),
    "hqq 2": ("hqq", {"nbits": 2}),
    "quanto 4": ("quanto", {}),
    "quanto 2": ("quanto", {"nbits": 2}),
}


def quality(only: str, prompt: int, steps: int) -> None:
    loaded = smollm2()
    base = reference(loaded, prompt, steps)
    print(f"mean KL(dense || cache) over {steps} teacher-forced steps after {prompt} tokens, float32")
    for name, make in caches(loaded.model):
        if re.search(only, name):
            print(f"{name:40s} {base.divergence(make()):.5f}", flush=True)


def states(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(1, HEADS, tokens, HEAD_DIM).to(dtype)


def new_cache(name: str) -> kvrack.Cache:
    backend, config = CODECS.get(name, (name, {}))
    return kvrack.create_cache(backend, kvrack.ModelSpec.uniform(LAYERS), **config)


def feed(cache: kvrack.Cache, tokens: int) -> None:
    for layer in range(LAYERS):
        cache.update(states(tokens), states(tokens), layer)


def memory() -> None:
    print(f"{'':10s} {'tokens':>7} {'of dense':>9} {'of the tokens':>14} {'with scratch':>13}")
    for tokens in (2048, 8192):
        bare = 2 * LAYERS * HEADS * HEAD_DIM * 2 * tokens
        dense = new_cache("dynamic")
        feed(dense, tokens)
        for name in CODECS:
            cache = new_cache(name)
            feed(cache, tokens - 1)
            feed(cache, 1)
            scratch = sum(row.nbytes for row in cache.memory() if row.role == "scratch")
            held = cache.nbytes - scratch
            print(
                f"{name:10s} {tokens:>7} {held / dense.nbytes:>9.3f} {held / bare:>14.3f} "
                f"{cache.nbytes / dense.nbytes:>13.3f}"
            )


def peak() -> None:
    peaks = {}
    for name in ("dynamic", *CODECS):
        with PeakBytes() as tracker:
            cache = new_cache(name)
            feed(cache, 2048)
            for _ in range(512):
                feed(cache, 1)
        peaks[name] = tracker.peak
        print(
            f"{name:10s} peak {tracker.peak / 1e6:6.1f} MB, {tracker.peak / peaks['dynamic']:.3f} of dense", flush=True
        )


def encoding() -> None:
    print(f"microseconds to encode a token in {LAYERS} layers, by tokens held (bfloat16)")
    for name in CODECS:
        costs = []
        for held in (1024, 4096, 16384):
            cache = new_cache(name)
            feed(cache, held)
            spent = Timer(cache)
            for _ in range(128):
                feed(cache, 1)
            costs.append(spent.seconds / spent.tokens * 1e6)
        print(f"{name:10s} " + "  ".join(f"{cost:8.1f}" for cost in costs), flush=True)


class Timer:
    """The seconds that a cache's codecs spend on encoding keys, and the tokens they encode, from now on."""

    def __init__(self, cache: kvrack.Cache) -> None:
        self.seconds, self.tokens = 0.0, 0.0
        for layer in cache.layers:
            assert isinstance(layer, EncodedLayer)
            for codec in layer._codecs:
                codec.encode = self.timed(codec.encode)  # type: ignore[method-assign]

    def timed(self, encode: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
        def wrapped(given: torch.Tensor) -> dict[str, torch.Tensor]:
            start = time.perf_counter()
            encoded = encode(given)
            self.seconds += time.perf_counter() - start
            # Of keys and values in each layer, so a token counts in full once all have encoded it.
            self.tokens += given.shape[2] / (2 * LAYERS)
            return encoded

        return wrapped


def speed(dtype: torch.dtype, held: int, repeats: int, attention: str) -> None:
    model = smollm2().model.to(dtype)
    kt.enable()
    timed: dict[str, Cache] = {"kvrack dynamic": kt.create_cache(model, "dynamic")}
    for name, (backend, config) in CODECS.items():
        timed[f"kvrack {name}"] = kt.create_cache(model, backend, **config)
    timed["transformers dynamic"] = DynamicCache(config=model.config)
    for name, (backend, config) in THEIRS.items():
        if "axis" not in name:
            timed[f"transformers {name}"] = QuantizedCache(backend, model.config, **config)
    for cache in timed.values():
        for layer in range(LAYERS):
            given = states(held, dtype)
            cache.update(given, given, layer)
    spent: dict[str, list[float]] = {name: [] for name in timed}
    token = torch.full((1, 1), 100)
    for turn in range(repeats + 1):
        for name, cache in timed.items():
            model.set_attn_implementation(attention if name.startswith("kvrack") else "sdpa")
            seconds = step(model, token, cache)
            if turn:
                spent[name].append(seconds)
    base = statistics.median(spent["kvrack dynamic"])
    print(
        f"decode step with {held} tokens held, {dtype}, kvrack's with attention {attention!r}, "
        f"median of {repeats}, {torch.get_num_threads()} threads"
    )
    for name, all_seconds in spent.items():
        seconds = statistics.median(all_seconds)
        print(f"{name:24s} {seconds * 1e3:7.1f} ms  {seconds / base:.2f} of dense")


@torch.no_grad()
def step(model: PreTrainedModel, token: torch.Tensor, cache: Cache) -> float:
    """Return the seconds that one token takes."""
    start = time.perf_counter()
    model(token, use_cache=True, **{CACHE_ARGUMENT: cache})
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["quality", "memory", "peak", "encoding", "speed"])
    parser.add_argument("--only", default="", help="pattern of the caches whose quality is measured")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--held", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--attention", default="sdpa", help="attn_implementation of steps with kvrack's caches")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        if arguments.what == "quality":
            quality(arguments.only, arguments.prompt, arguments.steps)
        elif arguments.what == "speed":
            speed(getattr(torch, arguments.dtype), arguments.held, arguments.repeats, arguments.attention)
        else:
            {"memory": memory, "peak": peak, "encoding": encoding}[arguments.what]()


if __name__ == "__main__":
    main()
