"""A long cache on disk: anonymous memory and step time, next to `dynamic` and to the disk's own read rate.

    python tests/benchmarks/bench_offload.py [--held 16000] [--layers 30] [--steps 8] [--folder DIR]

A model of SmolLM2-135M's shape with random weights (float32). Each cache is filled in a process of its own,
since only so is anonymous memory (RssAnon of /proc/self/status, less what the process had with the model loaded and
run once) the cache's: keys and values of a prompt of `held` tokens are given layer by layer, as a prefill in
chunks of 512 would, and then the model decodes. What the disk can do is measured in the same process:
the file's bytes read once in one go, by the same calls, into memory that is used again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvrack_transformers as kt
from kvrack_transformers.versions import CACHE_ARGUMENT

HEADS, KV_HEADS, HEAD_DIM, CHUNK = 9, 3, 64, 512


def anonymous() -> int:
    """Return the bytes of anonymous memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status: this benchmark needs Linux")


def build_model(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def read_all(path: Path) -> float:
    """Return the seconds that reading a file once takes."""
    memory = bytearray(1 << 23)
    descriptor = os.open(path, os.O_RDONLY)
    start, at = time.perf_counter(), 0
    while count := os.preadv(descriptor, [memory], at):
        at += count
    taken = time.perf_counter() - start
    os.close(descriptor)
    return taken


@torch.no_grad()
def measure(name: str, held: int, layers: int, steps: int, folder: str | None) -> dict[str, float]:
    """Fill a cache, decode, and return what it took."""
    model = build_model(layers)
    model(torch.tensor([[1, 2, 3]]))
    config = {} if name == "dynamic" else {"tier": "disk", "folder": folder}
    before = anonymous()
    cache = kt.create_cache(model, name, max_length=held + steps + 8, **config)
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    for at in range(0, held, CHUNK):
        states = torch.randn(1, KV_HEADS, min(CHUNK, held - at), HEAD_DIM, generator=generator)
        for index in range(layers):
            cache.update(states, states, index)
    filling = time.perf_counter() - start
    token, taken, grown = torch.tensor([[7]]), [], []
    for _ in range(steps + 2):
        start = time.perf_counter()
        token = model(token, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
        taken.append((time.perf_counter() - start) * 1e3)
        grown.append(anonymous() - before)
    result = {
        "filling": filling,
        "step": statistics.median(taken[2:]),
        "anonymous": max(grown),
        "kv": 2 * layers * KV_HEADS * HEAD_DIM * 4 * cache.get_seq_length(),
        "token": int(token),
    }
    if name != "dynamic":
        file = cache.layers[0]._hold.station.prefetcher._file.path
        result["read"] = min(read_all(file) for _ in range(3)) * 1e3 * result["kv"] / file.stat().st_size
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held", type=int, default=16000)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--folder")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.only:
        print(json.dumps(measure(given.only, given.held, given.layers, given.steps, given.folder)))
        return
    results = {}
    for name in ("dynamic", "offloaded"):
        command = [sys.executable, __file__, *sys.argv[1:], "--only", name]
        results[name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    dense, disk = results["dynamic"], results["offloaded"]
    print(f"{given.layers} layers, {KV_HEADS} heads, head_dim {HEAD_DIM}, float32, {given.held} tokens held:")
    print(f"  keys and values {dense['kv'] / 1e6:.0f} MB; the same token at the end: {dense['token'] == disk['token']}")
    for name, each in results.items():
        print(
            f"  {name:>9}: anonymous memory {each['anonymous'] / 1e6:5.0f} MB, decode step {each['step']:5.0f} ms, "
            f"filled in {each['filling']:.1f} s"
        )
    less = (dense["anonymous"] - disk["anonymous"]) / dense["kv"]
    print(f"  anonymous memory lower by {less:.0%} of the keys' and values' bytes (target: at least 70%)")
    floor = max(disk["read"], dense["step"])
    print(f"  reading the file's keys and values alone {disk['read']:.0f} ms")
    print(f"  a step on disk is {disk['step'] / dense['step']:.2f}x a step of dynamic,")
    print(f"  {disk['step'] / floor:.2f}x the longer of reading and that step, and")
    print(f"  {disk['step'] / (disk['read'] + dense['step']):.2f}x both one after the other")


if __name__ == "__main__":
    main()
