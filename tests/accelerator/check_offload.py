"""Offload on one accelerator: equal tokens, only new tokens out, and copies behind the computation. Under 3 minutes.

    python tests/accelerator/check_offload.py [--held 16384] [--steps 16]

For tier host and tier disk, over `dynamic`, `static` and `fp8` where they are installed:

- every tensor that `update` returns is bit for bit what the held backend returns, through prefill, decoding, beams,
  crop, offload() and prefetch(), reset and a second prompt;
- bytes out are those of the new tokens, bytes back those of a whole layer, each step;
- device memory of the keys and values stays that of two layers.

Then, with a model of random weights (Llama 3.2 1B's shape, bfloat16): a decode step with `offloaded` on the
host is timed against the larger of two floors: a step of `dynamic`, and the bytes of all layers over the bandwidth
of the bus, measured in the same run by copies of one layer's size from pinned memory. Exit code 0 if everything
holds and the step takes at most 1.3 times that floor.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time

import torch

import kvrack

LAYERS, BATCH, HEADS, HEAD_DIM = 6, 2, 4, 64
SLACK = 1.3


def states(device: torch.device, new: int, seed: int, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + new)
    keys, values = torch.randn(2, batch, HEADS, new, HEAD_DIM, generator=generator).to(device, torch.bfloat16)
    return keys, values


def feed(caches: list[kvrack.Cache], device: torch.device, new: int, seed: int, batch: int = BATCH) -> None:
    """Update every layer of every cache; raise unless all return the same bits."""
    for index in range(LAYERS):
        given = states(device, new, seed + index, batch)
        returned = [cache.update(*given, index) for cache in caches]
        # Work for the device behind which copies may run too early, if nothing orders them.
        torch.randn(1024, 1024, device=device) @ torch.randn(1024, 1024, device=device)
        for other in returned[1:]:
            for seen, wanted in zip(other, returned[0], strict=True):
                if not torch.equal(seen, wanted):
                    raise AssertionError(f"layer {index}, {new} new tokens: other bits than the held backend's")


def layer_bytes(layer: kvrack.CacheLayer) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in layer.storage().values())


def check_equal(name: str, tier: str, folder: str, device: torch.device) -> None:
    spec = kvrack.ModelSpec(
        layers=tuple(
            kvrack.LayerSpec(attention="sliding", window=64) if index % 3 == 1 else kvrack.LayerSpec()
            for index in range(LAYERS)
        )
    )
    place = {"tier": tier, **({"folder": folder} if tier == "disk" else {})}
    away = kvrack.create_cache("offload", spec, 4096, inner=name, **place)
    here = kvrack.create_cache(name, spec, 4096)
    caches, largest = [here, away], 0
    for turn, prompt in enumerate((1500, 300)):
        feed(caches, device, prompt, 10 * turn)
        for step in range(6):
            feed(caches, device, 1, 100 + 10 * step)
        feed(caches, device, 7, 300)
        for cache in caches:
            cache.reorder_cache(torch.tensor([1, 0], device=device))
        feed(caches, device, 1, 400)
        for cache in caches:
            cache.batch_repeat_interleave(2)
        feed(caches, device, 1, 500, 2 * BATCH)
        for index in range(LAYERS):
            away.offload(index)
            away.prefetch(index)
        feed(caches, device, 1, 600, 2 * BATCH)
        largest = max(largest, *(layer_bytes(layer) for layer in here.layers))
        for cache in caches:
            cache.reset()
    traffic = next(layer for layer in away.layers if hasattr(layer, "traffic")).traffic
    feed(caches, device, 1000, 700)
    feed(caches, device, 1, 800)
    feed(caches, device, 1, 810)
    before = (traffic.out, traffic.back)
    feed(caches, device, 1, 900)
    new_bytes = sum(layer_bytes(layer) for layer in here.layers)
    out, back = traffic.out - before[0], traffic.back - before[1]
    held = max(layer.get_seq_length() for layer in here.layers)
    if out > 4 * new_bytes / held:
        raise AssertionError(f"{out} bytes travelled out for one token of {new_bytes / held:.0f}")
    if back > 1.1 * new_bytes:
        raise AssertionError(f"{back} bytes travelled back where {new_bytes} are held")
    slots = sum(row.nbytes for row in away.memory() if row.role == "scratch" and row.device.startswith(device.type))
    decoded = sum(row.nbytes for row in here.memory() if row.role == "scratch")
    # Room to grow by, and static shows up to twice of what is used.
    if slots - decoded > 2 * 2.5 * largest:
        raise AssertionError(f"{slots - decoded} bytes of slots for layers of {largest} at most")
    print(f"  {tier} over {name}: equal; per step {out} bytes out, {back} back, {slots} in slots")


def synchronize(device: torch.device) -> None:
    torch.accelerator.synchronize(device)


def bandwidth(device: torch.device, nbytes: int) -> float:
    """Return bytes per second from pinned memory, in copies of `nbytes`."""
    source = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        synchronize(device)
        rates.append(nbytes / (time.perf_counter() - start))
    return statistics.median(rates)


@torch.no_grad()
def check_overlap(device: torch.device, held: int, steps: int) -> bool:
    """Print a decode step's time against its floors, and return whether it keeps within `SLACK` of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import kvrack_transformers as kt
    from kvrack_transformers.versions import CACHE_ARGUMENT

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1 << 17,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    taken, tokens, size = {}, {}, 0
    for name in ("dynamic", "offloaded"):
        cache = kt.create_cache(model, name, max_length=held + steps + 16)
        for index in range(config.num_hidden_layers):
            generator = torch.Generator().manual_seed(index)
            keys, values = torch.randn(2, 4, 8, held, 64, generator=generator).to(device, torch.bfloat16)
            cache.update(keys, values, index)
            size = 2 * keys.numel() * keys.element_size()
        token, times, chosen = torch.full((4, 1), 7, device=device), [], []
        for _ in range(steps + 4):
            synchronize(device)
            start = time.perf_counter()
            token = model(token, **{CACHE_ARGUMENT: cache}).logits[:, -1:].argmax(-1)
            synchronize(device)
            times.append(time.perf_counter() - start)
            chosen.append(token.flatten().tolist())
        taken[name], tokens[name] = statistics.median(times[4:]) * 1e3, chosen
        del cache
    rate = bandwidth(device, size)
    bus = config.num_hidden_layers * size / rate * 1e3
    floor = max(bus, taken["dynamic"])
    print(f"  {held} tokens held by 4 rows, 16 layers of {size / 1e6:.0f} MB, bus {rate / 1e9:.1f} GB/s")
    print(f"  step: dynamic {taken['dynamic']:.1f} ms, offloaded {taken['offloaded']:.1f} ms, the bus {bus:.1f}")
    print(f"  {taken['offloaded'] / floor:.2f}x the larger floor (at most {SLACK}x); tokens equal: ", end="")
    same = tokens["dynamic"] == tokens["offloaded"]
    print(same)
    return same and taken["offloaded"] <= SLACK * floor


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--held", type=int, default=16384)
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    if not torch.accelerator.is_available():
        print("no accelerator: nothing to check")
        return 2
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    print(f"{device}, torch {torch.__version__}")
    installed = kvrack.backends()
    with tempfile.TemporaryDirectory() as folder:
        for tier in ("host", "disk"):
            for name in ("dynamic", "static", "fp8"):
                if name in installed:
                    check_equal(name, tier, folder, device)
    return 0 if check_overlap(device, given.held, given.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
