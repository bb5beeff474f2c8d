"""A rank: who it is among the others, and how its process is set up."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
from dataclasses import dataclass

from lit_mnist.distributed.terminal import print_line
from lit_mnist.errors import InputError

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 1 << 30
# Step ids from here on are no tasks of srun: the batch script itself, an interactive shell, ...
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Rank:
    """One process of a run.

    Attributes:
        rank: Number among all ranks, from 0.
        world_size: Number of all ranks.
        local_rank: Number among the ranks of this machine, from 0.
        local_world_size: Number of ranks of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone prints, logs and writes."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.world_size // self.local_world_size

    @classmethod
    def from_environment(cls) -> Rank:
        """Returns what the launcher has written into the environment."""
        values = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        return cls(*values)


def launched_from_outside() -> bool:
    """Returns whether a launcher such as torchrun has started this process as one rank of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))


def adopt_slurm() -> None:
    """Writes into the environment which rank this is, where Slurm's srun has started this process as one of several.

    A shell of `salloc`, and a batch script that starts the command without srun, have some of Slurm's variables, too,
    but are no tasks of a step.

    Raises:
        InputError: The batch script has not said where the ranks meet, or the machines have unequal numbers of tasks.
    """
    slurm = os.environ
    if "RANK" in slurm or not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"} <= slurm.keys():
        return
    # The job's number of tasks may be another than that of this step, which srun can make smaller.
    tasks = int(slurm.get("SLURM_STEP_NUM_TASKS") or slurm.get("SLURM_NTASKS") or 1)
    if tasks == 1 or int(slurm["SLURM_STEP_ID"]) >= _SLURM_SPECIAL_STEPS:
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not slurm.get(name)]
    if missing:
        raise InputError(
            f"srun has started {tasks} tasks, but {' and '.join(missing)} is not set: export MASTER_ADDR (the first "
            "host of the job) and MASTER_PORT (a free port there) in the batch script, as configs/cluster/slurm.sbatch "
            "does."
        )
    os.environ.update(
        RANK=slurm["SLURM_PROCID"],
        WORLD_SIZE=str(tasks),
        LOCAL_RANK=slurm["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(_tasks_per_node(tasks)),
    )


def _tasks_per_node(tasks: int) -> int:
    """Returns how many tasks srun has started on each machine."""
    layout = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    # `2(x3)` stands for 2,2,2.
    counts = {int(count) for count in re.findall(r"(?<![x\d])\d+", layout or "")}
    if not counts:
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        layout, counts = f"{tasks} on {nodes} machines", {tasks // nodes} if tasks % nodes == 0 else set()
    if len(counts) != 1:
        raise InputError(
            f"srun has started unequal numbers of tasks on the machines ({layout}): ask for --ntasks-per-node."
        )
    return counts.pop()


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(threads: int | None, local_world_size: int) -> int:
    """Returns `run.threads`, or by default the cores that this process may use divided by the ranks."""
    return threads or max(1, cores() // local_world_size)


def die_with_parent(parent: int | None = None) -> None:
    """Lets the kernel kill this process when its parent ends, however that ends (Linux; elsewhere nothing).

    Args:
        parent: The parent, where it is known: it may have ended already.
    """
    if platform.system() == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def keep_memory() -> None:
    """Lets this process keep memory that a step has freed for the next one (glibc; elsewhere nothing).

    By default malloc gives large blocks back to the kernel, which clears them, page by page, before the next step gets
    them again: 2,000 pages in each step of 128 images.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # Older releases refuse a threshold above half of a heap.
        for threshold in (_KEPT_BYTES, 1 << 25):
            if mallopt(_M_MMAP_THRESHOLD, threshold):
                break
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def print_once(text: str) -> None:
    """Prints on rank 0, where an outside launcher has started several of this process."""
    if not launched_from_outside() or Rank.from_environment().is_first:
        print_line(text)


def warn_once(note: str) -> None:
    """Prints a warning on rank 0; see `print_once`."""
    print_once(f"warning: {note}")
