"""Decoding through static, next to dynamic and transformers' StaticCache in the same run.

    python tests/benchmarks/bench_static.py [--held 512] [--steps 24] [--skip-compiled]

Three measurements. A decode step of SmolLM2-135M-Instruct (float32, greedy) with 512 tokens held and
room for 4,096 and 8,192: eager, through static, dynamic and transformers' StaticCache; steps alternate, so
that drift of the machine hits all alike, and medians are printed. The same step compiled by inductor.
And appending one token to a full sliding window of 1,024, next to transformers' static sliding layer, for
heads of the shapes in `SHAPES`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.models import find_model, load_model
from kvrack_transformers.versions import CACHE_ARGUMENT

CAPACITIES = (4096, 8192)
LAYERS, WINDOW = 30, 1024
SHAPES = {"SmolLM2-135M": (3, 64), "Gemma 3 4B": (4, 256), "Gemma 3 27B": (16, 128)}
"""Key-value heads and head_dim: of the model above, which has no windows, and of two whose window is 1,024
(their config.json, google/gemma-3-4b-it and google/gemma-3-27b-it)."""


def alternate(steps: dict[str, Callable[[], None]], repeats: int, warm_up: int = 3) -> dict[str, float]:
    """Return the median milliseconds of each step, all of them run in turn."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for repeat in range(warm_up + repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if repeat >= warm_up:
                taken[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(times) for name, times in taken.items()}


def decoder(model: PreTrainedModel, cache: object, prompt: torch.Tensor, step: Callable | None = None) -> Callable:
    """Return a function that decodes one token, after `prompt` was fed to `model`."""
    run = model if step is None else step
    state = {"token": model(prompt, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)}

    def decode() -> None:
        state["token"] = run(state["token"], **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)

    return decode


def decode_steps(model: PreTrainedModel, prompt: torch.Tensor, repeats: int, compiled: bool) -> None:
    held = prompt.shape[1]
    print(f"decode step with {held} tokens held, median of {repeats}, ms")
    print(f"{'capacity':>9} {'dynamic':>9} {'static':>9} {'theirs':>9} {'static/dynamic':>15} {'theirs/dynamic':>15}")
    for capacity in CAPACITIES:
        steps = {
            "dynamic": decoder(model, kt.create_cache(model, "dynamic"), prompt),
            "static": decoder(model, kt.create_cache(model, "static", max_cache_len=capacity), prompt),
            "theirs": decoder(model, StaticCache(config=model.config, max_cache_len=capacity), prompt),
        }
        taken = alternate(steps, repeats)
        ours, static, theirs = taken["dynamic"], taken["static"], taken["theirs"]
        print(
            f"{capacity:>9} {ours:>9.1f} {static:>9.1f} {theirs:>9.1f} {static / ours:>14.2f}x {theirs / ours:>14.2f}x"
        )
    if not compiled:
        return
    torch._dynamo.reset()
    cache = kt.create_cache(model, "static", max_cache_len=CAPACITIES[0])
    graph = decoder(model, cache, prompt, torch.compile(model, fullgraph=True))
    eager = decoder(model, kt.create_cache(model, "static", max_cache_len=CAPACITIES[0]), prompt)
    taken = alternate({"compiled": graph, "eager": eager}, repeats)
    print(
        f"static at capacity {CAPACITIES[0]}: eager {taken['eager']:.1f} ms, compiled {taken['compiled']:.1f} ms: "
        f"{taken['eager'] / taken['compiled']:.2f}x faster"
    )


def window_appends(name: str, heads: int, head_dim: int, repeats: int) -> None:
    token = torch.randn(1, heads, 1, head_dim)
    filling = torch.randn(1, heads, WINDOW + 10, head_dim)
    spec = kvrack.ModelSpec.uniform(LAYERS, kvrack.LayerSpec(attention="sliding", window=WINDOW))
    rack = kvrack.create_cache("static", spec, max_cache_len=4 * WINDOW)
    theirs = [StaticSlidingWindowLayer(max_cache_len=4 * WINDOW, sliding_window=WINDOW) for _ in range(LAYERS)]
    for index, layer in enumerate(theirs):
        rack.update(filling, filling, index)
        layer.update(filling, filling)

    def append_ours() -> None:
        for index in range(LAYERS):
            rack.update(token, token, index)

    def append_theirs() -> None:
        for layer in theirs:
            layer.update(token, token)

    taken = alternate({"ours": append_ours, "theirs": append_theirs}, repeats)
    print(
        f"one token to {LAYERS} full windows of {WINDOW}, {heads} heads of {head_dim} ({name}): "
        f"static {taken['ours']:.2f} ms, transformers {taken['theirs']:.2f} ms: "
        f"{taken['theirs'] / taken['ours']:.1f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held", type=int, default=512)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip-compiled", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, (heads, head_dim) in SHAPES.items():
            window_appends(name, heads, head_dim, repeats=30)
        model = load_model(find_model("smollm2"), "cpu", lambda _: nullcontext()).model
        prompt = torch.randint(100, 20000, (1, arguments.held))
        decode_steps(model, prompt, arguments.steps, not arguments.skip_compiled)


if __name__ == "__main__":
    main()
