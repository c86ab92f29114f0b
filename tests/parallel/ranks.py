"""What each rank does: python ranks.py JOB FOLDER SECONDS, under torchrun. It reports in JSON."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.enabling import noting_caches
from kvrack_transformers.versions import CACHE_ARGUMENT

sys.path.insert(0, str(Path(__file__).parent))
from launcher import report_path

Report = dict[str, Any]

NEW = 10
CODES = {"residual_length": 4, "q_group_size": 8}
ROOM = {"max_cache_len": 64}
USES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("dynamic", {}),
    "static": ("static", ROOM),
    "fp8": ("fp8", {}),
    "fp8 static": ("fp8", {"layout": "static", **ROOM}),
    "hqq": ("hqq", CODES),
    "hqq static": ("hqq", {**CODES, "layout": "static", **ROOM}),
    "quanto": ("quanto", CODES),
    "quantized": ("quantized", {"backend": "hqq", **CODES}),
    "offload": ("offload", {"tier": "disk"}),
    "offload of hqq": ("offload", {"tier": "disk", "inner": "hqq", "inner_config": CODES}),
    "offloaded": ("offloaded", {"tier": "disk"}),
    "offloaded_static": ("offloaded_static", {"tier": "disk", **ROOM}),
    "mamba": ("mamba", {}),
    "encoder-decoder": ("encoder-decoder", {}),
}
"""Every backend by name and config, codecs in both layouts, with blocks that a short answer fills."""

WINDOWED = ("dynamic", "static", "fp8 static", "hqq", "offload")
"""Those that a model with windows goes through, one for each layout and kind of buffer."""


def prompt(rows: int = 1, length: int = 13, seed: int = 1) -> torch.Tensor:
    """Return random tokens ``[rows, length]``, the same in each process."""
    return torch.randint(2, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


def load_whole(folder: Path, name: str) -> PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()


def load_split(folder: Path, name: str) -> PreTrainedModel:
    """Return this rank's part of the model, as `tp_plan="auto"` splits it over all ranks."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / name, dtype=torch.float32, distributed_config=DistributedConfig(tp_plan="auto")
    ).eval()


def generate(model: PreTrainedModel, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    settings = {"do_sample": False, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids), **settings}
    return model.generate(ids, **settings)


def used(model: PreTrainedModel, ids: torch.Tensor, name: str, config: dict[str, Any]) -> tuple[list[int], Any]:
    """Return the tokens that the model answers through a cache, and the cache."""
    with noting_caches() as built:
        output = generate(model, ids, cache_implementation=name, cache_config=config)
    return output[0].tolist(), built[0]


def sizes(cache: Any) -> dict[str, int]:
    """Return the bytes held by role. Room in a file comes in pages, and scratch in quarters, so both go without."""
    held: dict[str, int] = {}
    for row in cache.memory():
        if row.role not in ("room", "scratch"):
            held[row.role] = held.get(row.role, 0) + row.nbytes
    return held


def message(call: Any) -> str:
    """Return what `call` refuses with."""
    try:
        call()
    except kvrack.KvrackError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


# --- what every job may do ------------------------------------------------------------------------


def answers(folder: Path, name: str, uses: Iterable[str]) -> Report:
    """Tensor parallelism: what this rank's part of a model answers through caches, and what they hold."""
    ids, report = prompt(), {}
    whole, part = load_whole(folder, name), load_split(folder, name)
    for use in uses:
        backend, config = USES[use]
        expected, whole_cache = used(whole, ids, backend, config)
        tokens, cache = used(part, ids, backend, config)
        report[use] = {
            "tokens": tokens,
            "expected": expected,
            "bytes": sizes(cache),
            "whole bytes": sizes(whole_cache),
            "heads": [layer.keys.shape[1] for layer in cache.rack.layers],
            "spec": [layer.kv_heads for layer in cache.rack.model_spec.layers],
            **saved(folder, part, use, tokens, cache),
        }
    return report


def saved(folder: Path, part: PreTrainedModel, use: str, tokens: list[int], cache: Any) -> Report:
    """Every rank saves to the same path, and goes on with what it loads from there."""
    path = folder / f"{use}.kv"
    cache.save(path)
    distributed.barrier()
    ids = torch.tensor([tokens])
    loaded = kt.load(part, path)
    continued, expected = (
        generate(part, ids, max_new_tokens=4, **{CACHE_ARGUMENT: each})[0].tolist() for each in (loaded, cache)
    )
    return {"continued": continued, "not saved": expected}


# --- jobs -----------------------------------------------------------------------------------------


def two(folder: Path) -> Report:
    """Two ranks: every backend, and whatever else is done with a cache."""
    report: Report = {"llama": answers(folder, "llama", USES), "mistral": answers(folder, "mistral", WINDOWED)}
    whole, part = load_whole(folder, "llama"), load_split(folder, "llama")
    report["beams"] = beams(whole, part)
    report["fingerprints"] = [kt.fingerprint(part), kt.fingerprint(load_split(folder, "llama")), kt.fingerprint(whole)]
    report["store"] = store(folder, whole, part)
    rank = distributed.get_rank()
    used(whole, prompt(), "dynamic", {})[1].save(folder / f"whole{rank}.kv")
    report["of one process"] = message(lambda: kt.load(part, folder / f"whole{rank}.kv"))
    report["data parallel"] = {use: data_parallel(whole, *USES[use]) for use in ("dynamic", "static", "hqq")}
    return report


def beams(whole: PreTrainedModel, part: PreTrainedModel) -> Report:
    """Beam search reorders the rows of every rank's part."""
    settings = {"num_beams": 3, "num_return_sequences": 3}
    expected = generate(whole, prompt(), use_cache=False, **settings)
    return {
        "expected": expected.tolist(),
        **{
            use: generate(part, prompt(), cache_implementation=use, **settings).tolist()
            for use in ("dynamic", "static")
        },
    }


def store(folder: Path, whole: PreTrainedModel, part: PreTrainedModel) -> Report:
    """Stores in one folder, one after the other: the second reads what the first one's process left, and of the
    third the first rank's files are gone."""
    ids = prompt(length=20)
    report: Report = {"expected": generate(whole, ids, use_cache=False).tolist(), "tokens": [], "hits": []}
    for run in range(3):
        distributed.barrier()
        if run == 2 and distributed.get_rank() == 0:
            for path in (folder / "store").glob("*.rank0of2.safetensors"):
                path.unlink()
        prefixes = kvrack.PrefixStore(1 << 30, folder / "store", kt.fingerprint(part), kt.layer_devices(part))
        distributed.barrier()
        report["tokens"].append(
            kt.generate(part, ids, prefix_store=prefixes, do_sample=False, max_new_tokens=NEW).tolist()
        )
        report["hits"].append(prefixes.stats.hits)
    return report


def data_parallel(model: PreTrainedModel, name: str, config: dict[str, Any]) -> Report:
    """Each rank answers two rows of four through DistributedDataParallel, step by step; the same rows by themselves.

    With `find_unused_parameters` and grad enabled DDP takes the output apart as a pytree and rebuilds it.
    """
    rank, rows = distributed.get_rank(), prompt(rows=4)
    report: Report = {"expected": generate(model, rows, cache_implementation=name, cache_config=config).tolist()}
    for rebuilds in (False, True):
        parallel = DistributedDataParallel(model, find_unused_parameters=rebuilds)
        cache = kt.create_cache(model, name, max_length=rows.shape[1] + NEW, **config)
        ids = fed = rows[2 * rank : 2 * rank + 2]
        with torch.set_grad_enabled(rebuilds):
            for _ in range(NEW):
                output = parallel(input_ids=fed, use_cache=True, **{CACHE_ARGUMENT: cache})
                cache = output[CACHE_ARGUMENT]
                fed = output.logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, fed], dim=1)
        gathered = [torch.empty_like(ids) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, ids)
        report["rebuilt" if rebuilds else "tokens"] = torch.cat(gathered).tolist()
    return report


def four(folder: Path) -> Report:
    """Four ranks, one KV head each, in the folder where two have saved. Once they have reported one is killed."""
    report: Report = {"four": answers(folder, "four", ("dynamic", "static", "hqq", "offload of hqq"))}
    part = load_split(folder, "four")
    report["of two"] = message(lambda: kt.load(part, folder / "fp8.kv"))
    return report


def die(folder: Path) -> None:
    """The last of the ranks is killed while the others wait for it in the middle of an answer."""
    part = load_split(folder, "four")
    if distributed.get_rank() == distributed.get_world_size() - 1:
        part.model.layers[1].register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    generate(part, prompt(), cache_implementation="dynamic")


JOBS = {job.__name__: job for job in (two, four)}


def main(job: str, folder: str, seconds: str) -> None:
    faulthandler.dump_traceback_later(int(seconds), exit=True)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kt.enable()
    distributed.init_process_group("gloo")
    report = JOBS[job](Path(folder))
    report_path(Path(folder), job, distributed.get_rank()).write_text(json.dumps(report))
    distributed.barrier()
    if job == four.__name__:
        die(Path(folder))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
