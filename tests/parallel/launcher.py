"""Start a job in several ranks under torchrun, and bring back what each reports, or why one died."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

RANKS = Path(__file__).parent / "ranks.py"
GRACE = 60
"""Seconds beside the ranks' own, in which torchrun and they start and it notices their end."""
TELLS = 20_000
"""Characters of what the ranks wrote that an error repeats."""


class RanksError(RuntimeError):
    """A rank died, or took too long; none of them runs any more."""


def launch(job: str, ranks: int, folder: Path, timeout: int) -> list[dict[str, Any]]:
    """Return what each rank of `job` reports.

    torchrun takes a free port, and stops the other ranks when one dies. A rank that takes too long ends
    itself and says where it hung, so that none is left behind even if this process is killed.

    Args:
        job: name of a function in ranks.py.
        ranks: how many processes.
        folder: what the job reads from, and writes to.
        timeout: seconds that the ranks have.

    Raises RanksError, which says which rank died and how.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    process = subprocess.Popen(
        [*torchrun, str(RANKS), job, str(folder), str(timeout)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    try:
        written, _ = process.communicate(timeout=timeout + GRACE)
    except BaseException:
        # Asked to stop, torchrun stops its ranks.
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    if process.returncode:
        raise RanksError(f"{job}: not all of {ranks} ranks came to their end\n{written[-TELLS:]}")
    return reports(folder, job, ranks)


def reports(folder: Path, job: str, ranks: int) -> list[dict[str, Any]]:
    """Return what each rank of a job reported. Raises FileNotFoundError where one never came so far."""
    return [json.loads(report_path(folder, job, rank).read_text()) for rank in range(ranks)]


def report_path(folder: Path, job: str, rank: int) -> Path:
    """Return the file that a rank reports in."""
    return folder / f"{job}.{rank}.json"
