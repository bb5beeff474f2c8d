"""Stands for Slurm's `srun` on a machine without Slurm: starts a process per rank with Slurm's variables."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.processes import die_with_parent
from ddp_doctor.records.spec import FOLDER, read

# The short options that take the next word as their value.
_WITH_VALUE = set("AcCdDeGiJLmMnNopPqrtTwWx")


def without_options(words: Sequence[str]) -> list[str]:
    """Returns the command that srun is given, without srun's own options."""
    left = list(words)
    while left and left[0].startswith("-"):
        word = left.pop(0)
        short = not word.startswith("--") and len(word) == 2 and word[1] in _WITH_VALUE
        # A long option without `=` may take the next word: a program has a path or is on PATH.
        long = word.startswith("--") and "=" not in word and left and left[0].replace(":", "").isdigit()
        if (short or long) and left:
            left.pop(0)
    return left


def main() -> int:
    """Starts the ranks, and returns the first exit code that is not 0."""
    world_size = read(Path(os.environ[FOLDER])).world_size
    command = without_options(sys.argv[1:])
    each = {"SLURM_NTASKS": world_size, "SLURM_NPROCS": world_size, "SLURM_NNODES": 1, "SLURM_JOB_NUM_NODES": 1}
    names = {"SLURM_JOB_ID": "1", "SLURM_JOBID": "1", "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_NODELIST": "127.0.0.1"}
    names |= {"SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": str(world_size), "SLURM_NTASKS_PER_NODE": str(world_size)}
    running = [
        subprocess.Popen(
            command,
            env={
                **os.environ,
                **names,
                **{name: str(value) for name, value in each.items()},
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
            },
            # There are no threads.
            preexec_fn=die_with_parent,  # noqa: PLW1509
        )
        for rank in range(world_size)
    ]
    codes = [process.wait() for process in running]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
