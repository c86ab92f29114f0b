"""Cost of appending one token to 30 layers, next to transformers' DynamicCache in the same run.

    python tests/benchmarks/bench_append.py [--repeats 15] [--backend dynamic]

Layers have the shape of SmolLM2-135M (3 key-value heads, head_dim 64, float32). For each number of
tokens held, both caches are appended to in turn, so that drift of the machine hits both; medians
are printed. Then both grow to 16,384 tokens one at a time from a prompt of 1,024, and the peak of
the memory that their tensors take is compared with the bytes held at the end.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers import DynamicCache

import kvrack
from kvrack_transformers.bench.allocations import PeakBytes

LAYERS, HEADS, HEAD_DIM = 30, 3, 64
HELD = (256, 1024, 4096, 16384)
Update = Callable[[torch.Tensor, torch.Tensor, int], object]


def states(tokens: int) -> torch.Tensor:
    return torch.randn(1, HEADS, tokens, HEAD_DIM)


def append_everywhere(update: Update, token: torch.Tensor) -> float:
    """Return the milliseconds that one more token takes in all layers."""
    start = time.perf_counter()
    for layer in range(LAYERS):
        update(token, token, layer)
    return (time.perf_counter() - start) * 1e3


def filled(update: Update, tokens: int) -> None:
    for layer in range(LAYERS):
        update(states(tokens), states(tokens), layer)


def timings(backend: str, repeats: int) -> None:
    print(
        f"appending one token to {LAYERS} layers ({HEADS} heads, head_dim {HEAD_DIM}, float32), median of {repeats}, ms"
    )
    print(f"{'held':>8} {backend:>12} {'transformers':>14} {'ratio':>8}")
    token, ours_by_held = states(1), []
    for held in HELD:
        rack = kvrack.create_cache(backend, kvrack.ModelSpec.uniform(LAYERS), max_length=2 * max(HELD))
        own = DynamicCache()
        filled(rack.update, held)
        filled(own.update, held)
        append_everywhere(rack.update, token)
        pairs = [(append_everywhere(rack.update, token), append_everywhere(own.update, token)) for _ in range(repeats)]
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        ours_by_held.append(ours)
        print(f"{held:>8} {ours:>12.2f} {theirs:>14.2f} {theirs / ours:>7.1f}x")
    print(f"from {HELD[0]} to {HELD[-1]} tokens held, {backend} takes {max(ours_by_held) / ours_by_held[0]:.2f}x")


def peaks(backend: str, prompt: int, total: int) -> None:
    def grow(update: Update, tracker: PeakBytes) -> None:
        for layer in range(LAYERS):
            update(states(prompt), states(prompt), layer)
        tracker.peak = tracker.now
        token = states(1)
        for _ in range(prompt, total):
            for layer in range(LAYERS):
                update(token, token, layer)

    held = 2 * LAYERS * HEADS * HEAD_DIM * 4 * total
    cache = kvrack.create_cache(backend, kvrack.ModelSpec.uniform(LAYERS))
    with PeakBytes() as tracker:
        grow(cache.update, tracker)
    print(
        f"growing from {prompt} to {total} tokens one at a time: {held / 1e6:.0f} MB of keys and values at the end, "
        f"{cache.nbytes / held:.3f}x that allocated, peak {tracker.peak / held:.3f}x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--backend", default="dynamic")
    parser.add_argument("--total", type=int, default=16384)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    with torch.no_grad():
        timings(arguments.backend, arguments.repeats)
        peaks(arguments.backend, prompt=1024, total=arguments.total)


if __name__ == "__main__":
    main()
