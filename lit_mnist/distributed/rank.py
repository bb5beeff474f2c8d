"""The rank of this process, from the environment of the launcher or of Slurm, and the setup of the process."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

from lit_mnist.distributed.terminal import print_line
from lit_mnist.errors import InputError

_T = TypeVar("_T")

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# A frame of 258 KiB. CPython rounds its chunk up to 512 KiB, and the frames of the function use the rest.
_SLOTS_OF_LARGE_FRAME = 33_000
_KEPT_BYTES = 1 << 30
_MALLOC_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"}
# Larger step IDs stand for the batch script itself, an interactive shell, ...
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0


@dataclass(frozen=True)
class Rank:
    """The position of a process in a run.

    Attributes:
        rank: Index among all ranks.
        world_size: Number of all ranks.
        local_rank: Index among the ranks of this machine.
        local_world_size: Number of ranks of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the only one that prints, logs and writes."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.world_size // self.local_world_size

    @classmethod
    def from_environment(cls) -> Rank:
        """Returns the rank that the launcher has set in the environment."""
        return cls(*(int(os.environ[name]) for name in _VARIABLES))


def launched_from_outside() -> bool:
    """Returns whether an external launcher such as torchrun has started this process."""
    return {*_VARIABLES, "MASTER_ADDR"} <= os.environ.keys()


def check_ranks_environment() -> None:
    """Checks the variables of an external launcher: an incomplete set would make each rank train alone.

    Raises:
        InputError: A variable is missing, or not a number.
    """
    given = [name for name in _VARIABLES if name in os.environ]
    # A job of Kubernetes sets RANK and WORLD_SIZE for a container that starts its ranks itself.
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= set(given):
        return
    for name in given:
        if not os.environ[name].isdecimal():
            raise InputError(f"{name} must be a number, but is {os.environ[name]!r}: a launcher sets it.")
    missing = [name for name in (*_VARIABLES, "MASTER_ADDR") if name not in os.environ]
    if int(os.environ["WORLD_SIZE"]) > 1 and missing:
        raise InputError(
            f"RANK and WORLD_SIZE say that this is one of {os.environ['WORLD_SIZE']} ranks, but "
            f"{' and '.join(missing)} is not set: use torchrun, or set it for each rank."
        )


def adopt_slurm() -> None:
    """Translates Slurm's environment variables to torchrun's if srun has started this process as one of several tasks.

    A shell of `salloc` and a batch script without srun have some of these variables, but are not tasks of a step.

    Raises:
        InputError: MASTER_ADDR or MASTER_PORT is not set, or the machines have unequal numbers of tasks.
    """
    slurm = os.environ
    if "RANK" in slurm or not {"SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID"} <= slurm.keys():
        return
    # The step may have fewer tasks than the job.
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
    layout = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    # `2(x3)` means 2,2,2.
    counts = {int(count) for count in re.findall(r"(?<![x\d])\d+", layout or "")}
    if not counts:
        nodes = int(os.environ.get("SLURM_NNODES", "1"))
        layout, counts = f"{tasks} on {nodes} machines", {tasks // nodes} if tasks % nodes == 0 else set()
    if len(counts) != 1:
        raise InputError(
            f"srun has started unequal numbers of tasks on the machines ({layout}): ask for --ntasks-per-node."
        )
    return counts.pop()


def count_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(threads: int | None, local_world_size: int) -> int:
    """Returns `run.threads`, or by default the cores that this process may use divided by the ranks."""
    return threads or max(1, count_cores() // local_world_size)


def die_with_parent(parent: int | None = None) -> None:
    """Lets the kernel kill this process when its parent exits (Linux only).

    Args:
        parent: The parent's process ID. If it is given and the parent has exited already, this process is killed.
    """
    if platform.system() == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def keep_memory() -> None:
    """Lets malloc reuse the freed memory of a step in the next one (glibc only).

    By default malloc returns large blocks to the kernel, which clears each page before the next use: 2,000 pages in
    each step of 128 images. Thresholds that the environment sets are not changed.
    """
    if _MALLOC_VARIABLES & os.environ.keys() or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        # Older releases reject a threshold above half of a heap.
        for threshold in (_KEPT_BYTES, 1 << 25):
            if mallopt(_M_MMAP_THRESHOLD, threshold):
                break
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def call_with_deep_stack(function: Callable[..., _T], *args: Any) -> _T:
    """Calls a function, with memory for the frames of the functions that it calls.

    CPython keeps frames in chunks of 16 KiB. A call that does not fit into the chunk maps another one, and its return
    unmaps it: 7 µs instead of 0.03 µs for each call at that depth. The chunk of a larger frame is larger.
    """
    code = _call.__code__.replace(co_stacksize=_SLOTS_OF_LARGE_FRAME)
    result: _T = FunctionType(code, {})(function, args)
    return result


def _call(function: Callable[..., _T], args: tuple[Any, ...]) -> _T:
    return function(*args)


def print_once(text: str) -> None:
    """Prints a text. Under an external launcher only rank 0 prints it."""
    if not launched_from_outside() or Rank.from_environment().is_first:
        print_line(text)


def warn_once(text: str) -> None:
    """Prints a warning; see `print_once`."""
    print_once(f"warning: {text}")
