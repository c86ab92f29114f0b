"""What each rank does: python ranks.py JOB FOLDER SECONDS, under torchrun. It reports in JSON."""

from __future__ import annotations

import faulthandler
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig

import kvrack
import kvrack_transformers as kt
from kvrack_transformers.enabling import noting_caches

sys.path.insert(0, str(Path(__file__).parent))
from launcher import report_path

Report = dict[str, Any]

NEW = 10
CODES = {"residual_length": 4, "q_group_size": 8}
USES: dict[str, tuple[str, dict[str, Any]]] = {
    "dynamic": ("dynamic", {}),
    "static": ("static", {}),
    "fp8": ("fp8", {}),
    "fp8 static": ("fp8", {"layout": "static"}),
    "hqq": ("hqq", CODES),
    "hqq static": ("hqq", {**CODES, "layout": "static"}),
    "quanto": ("quanto", CODES),
    "quantized": ("quantized", {"backend": "hqq", **CODES}),
    "offload": ("offload", {"tier": "disk"}),
    "offload of hqq": ("offload", {"tier": "disk", "inner": "hqq", "inner_config": CODES}),
    "offloaded": ("offloaded", {"tier": "disk"}),
    "offloaded_static": ("offloaded_static", {"tier": "disk"}),
    "mamba": ("mamba", {}),
    "encoder-decoder": ("encoder-decoder", {}),
}
"""Every backend by name and config, codecs in both layouts, with blocks that a short answer fills."""


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


# --- jobs -----------------------------------------------------------------------------------------


def split(folder: Path) -> Report:
    """Tensor parallelism: every backend, what it holds, and what else is done with a cache."""
    ids = prompt()
    report: Report = {}
    for name in ("llama", "mistral"):
        whole, part = load_whole(folder, name), load_split(folder, name)
        report[name] = {}
        for use, (backend, config) in USES.items():
            expected, whole_cache = used(whole, ids, backend, config)
            tokens, cache = used(part, ids, backend, config)
            report[name][use] = {
                "tokens": tokens,
                "expected": expected,
                "bytes": sizes(cache),
                "whole bytes": sizes(whole_cache),
                "heads": [layer.keys.shape[1] for layer in cache.rack.layers],
                "spec": [layer.kv_heads for layer in cache.rack.model_spec.layers],
            }
    return report


def main(job: str, folder: str, seconds: str) -> None:
    faulthandler.dump_traceback_later(int(seconds), exit=True)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kt.enable()
    distributed.init_process_group("gloo")
    report = {"split": split}[job](Path(folder))
    report_path(Path(folder), job, distributed.get_rank()).write_text(json.dumps(report))
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
