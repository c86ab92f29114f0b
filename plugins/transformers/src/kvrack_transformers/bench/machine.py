"""What it was measured on, in words."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import kvrack
from kvrack_transformers.bench.results import Machine

if TYPE_CHECKING:
    import torch

WRAPPED = {"kvrack-hqq": "hqq", "kvrack-quanto": "optimum-quanto"}
"""Libraries whose release matters beside that of the distribution that wraps them."""


def describe_machine(device: torch.device, backends: set[str]) -> Machine:
    """Return the description of this machine and of the releases that take part.

    Args:
        device: where the model runs.
        backends: names of the backends measured.
    """
    import torch

    distributions = {"kvrack", "kvrack-transformers", "torch", "transformers"}
    for name, info in kvrack.backends().items():
        if name in backends:
            distributions |= {info.distribution, WRAPPED.get(info.distribution, "torch")}
    versions = {"Python": platform.python_version()}
    for distribution in sorted(distributions):
        try:
            versions[distribution] = version(distribution)
        except PackageNotFoundError:
            continue
    place = str(device)
    if device.type == "cuda":
        place = f"{device} ({torch.cuda.get_device_name(device)})"
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=_memory(),
        system=f"{platform.system()} {platform.machine()}",
        device=place,
        threads=torch.get_num_threads(),
        versions=versions,
    )


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return 0
