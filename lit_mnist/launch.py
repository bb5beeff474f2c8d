"""Starts the ranks of one machine with torch.multiprocessing, and names the rank that failed.

The ranks are forked from this process, which has imported everything and parsed the command: they start at once. They
find each other through a file, so that nothing listens beyond loopback. A Trainer starts no further ranks where
LOCAL_RANK is set, and uses the process group that exists. Before the fork, this process must not run a
parallel torch operation and must not touch a GPU. With `spawn`, each rank is a new Python process.

A rank ends with the exit code of its error: 2 (rejected input), 4 (not finite), 128 + signal (stopped), or 1. It leaves
its message in the private folder of the launcher, which reports the first failure, and ends with that code, or with 3.
"""

import ctypes
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.multiprocessing import get_context

from lit_mnist.errors import InputError, NonFiniteError, StoppedError
from lit_mnist.plugins.failure_report import STATUS_VARIABLE, RankStatus
from lit_mnist.plugins.stop import heeded
from lit_mnist.trainer import choose_devices

StartMethod = Literal["fork", "spawn"]

# torchrun's variables, and those that srun sets for each task.
_SLURM = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "LOCAL_WORLD_SIZE": "SLURM_TASKS_PER_NODE",
}
# Seconds in which ranks end by themselves after a failure.
_GRACE = 2.0


class Failure(NamedTuple):
    """Why the ranks ended: a message and the exit code of the command."""

    message: str
    code: int


class Ranks(NamedTuple):
    """The ranks of a command.

    Attributes:
        device_type: `cuda` or `cpu`.
        devices: Number of ranks on this machine.
        are_started: Whether torchrun, srun or another launcher has started them, and this process is one of them.
    """

    device_type: str
    devices: int
    are_started: bool


def plan_ranks(accelerator: str, devices: list[int] | str | int, num_nodes: int) -> Ranks:
    """Returns the ranks of a command: who starts them, how many there are, and whether all options agree.

    Args:
        accelerator: As for a Trainer.
        devices: As for a Trainer; `auto` is the number of ranks that another launcher has started on this machine.
        num_nodes: Number of machines.

    Raises:
        InputError: The options are invalid, or another launcher has started another number of ranks.
    """
    if "SLURM_STEP_ID" in os.environ and os.environ.get("SLURM_NTASKS", "1") != "1":
        for name, of_slurm in _SLURM.items():
            os.environ.setdefault(name, os.environ[of_slurm].split("(")[0])
    are_started = {"RANK", "WORLD_SIZE"} <= os.environ.keys()
    try:
        device_type, count = choose_devices(accelerator, devices)
    except (ValueError, TypeError, MisconfigurationException) as error:
        raise InputError(f"trainer.devices {devices}: {error}") from error
    if not count:
        raise InputError(f"trainer.accelerator {accelerator}, trainer.devices {devices}: there is no such device.")
    if are_started and count * num_nodes != int(os.environ["WORLD_SIZE"]):
        raise InputError(
            f"trainer.devices {count} on trainer.num_nodes {num_nodes} are {count * num_nodes} ranks, but "
            f"{os.environ['WORLD_SIZE']} were started. Give the numbers of the launcher."
        )
    if not are_started and num_nodes > 1:
        raise InputError(f"trainer.num_nodes {num_nodes}: start the ranks of several machines with torchrun or srun.")
    return Ranks(device_type, count, are_started)


def join_group(device_type: str, timeout: float, store: str = "env://") -> None:
    """Joins the process group, of whose ranks the environment tells.

    Args:
        device_type: `cuda` (nccl) or `cpu` (gloo).
        timeout: Seconds that a rank waits for the others.
        store: How the ranks find each other.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store, timedelta(seconds=timeout), rank=rank, world_size=world_size)


def keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next step instead of returning it to the kernel, which clears it again.

    It makes steps on CPUs shorter (`mallopt(3)`: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD).
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(-3, 1 << 30)
        libc.mallopt(-1, (1 << 31) - 1)


def set_threads(ranks: int) -> None:
    """Divides the cores among the ranks of this machine, unless OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))


def launch(
    function: Callable[..., None],
    args: tuple[Any, ...],
    ranks: Ranks,
    *,
    timeout: float = 120.0,
    start_method: StartMethod = "fork",
    max_restarts: int = 0,
    on_restart: Callable[[], tuple[Any, ...]] | None = None,
) -> None:
    """Runs `function(*args)` in each rank of this machine, and returns when all have succeeded.

    The function runs in this process if it is a rank already, or the only one without restarts. Of several ranks, each
    has joined the process group when the function is called.

    Args:
        function: The work of a rank; with `spawn`, it and `args` must be picklable.
        args: Its arguments.
        ranks: The ranks.
        timeout: Seconds that a rank waits for the others in a collective.
        start_method: `fork` or `spawn`.
        max_restarts: How often to start all ranks again after one has failed.
        on_restart: Returns the arguments for the ranks that are started again.

    Raises:
        SystemExit: The ranks have failed; the message is printed.
    """
    if ranks.are_started and max_restarts:
        raise InputError("max_restarts: the ranks were started by a launcher. Give the restarts to it.")
    if ranks.are_started or (ranks.devices == 1 and not max_restarts):
        keep_freed_memory()
        set_threads(ranks.devices)
        function(*args)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    for attempt in range(max_restarts + 1):
        failure = _run(function, args, ranks.devices, ranks.device_type, timeout, start_method)
        if failure is None:
            return
        print(failure.message, file=sys.stderr, flush=True)
        if failure.code != 3 or attempt == max_restarts:
            sys.exit(failure.code)
        print(f"restarting all ranks ({attempt + 1} of {max_restarts})", file=sys.stderr, flush=True)
        args = on_restart() if on_restart else args


def _run(
    function: Callable[..., None],
    args: tuple[Any, ...],
    world_size: int,
    device_type: str,
    timeout: float,
    start_method: StartMethod,
) -> Failure | None:
    received: list[int] = []
    processes: list[Any] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        for process in processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    context: Any = get_context(start_method)
    previous = {each: signal.signal(each, forward) for each in heeded()}
    with tempfile.TemporaryDirectory(prefix="lit_mnist-") as folder:
        status = RankStatus(Path(folder) / "status", world_size)
        try:
            for rank in range(world_size):
                rank_args = (rank, function, args, world_size, device_type, timeout, folder, os.getpid())
                processes.append(context.Process(target=_rank, args=rank_args))
                processes[-1].start()
            while not any(process.exitcode for process in processes):
                running = [process.sentinel for process in processes if process.is_alive()]
                if not running:
                    return None
                wait(running, timeout=1)
            # The others lose their peer, or get the same error, within moments.
            deadline = time.monotonic() + _GRACE
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            return _first_failure(processes, Path(folder), status, timeout, received)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def _rank(
    local_rank: int,
    function: Callable[..., None],
    args: tuple[Any, ...],
    world_size: int,
    device_type: str,
    timeout: float,
    folder: str,
    launcher: int,
) -> None:
    """Runs the function in a rank; after an error, the process ends at once, since the others may wait for it."""
    for signum in heeded():
        signal.signal(signum, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a rank does not outlive its launcher
    if os.getppid() != launcher:
        os._exit(1)
    os.environ.update(RANK=str(local_rank), LOCAL_RANK=str(local_rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    # Some libraries read these, though nothing listens there.
    os.environ.update(LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Within a job of Slurm, Lightning would take the rank of the job's one process.
    os.environ.pop("SLURM_NTASKS", None)
    os.environ[STATUS_VARIABLE] = f"{folder}/status"
    keep_freed_memory()
    set_threads(world_size)
    code = 1
    try:
        join_group(device_type, timeout, f"file://{folder}/store")
        RankStatus(Path(folder) / "status", world_size).update(local_rank, 0)
        function(*args)
        dist.destroy_process_group()
        return
    except BaseException as error:
        failure = describe(error)
        code = failure.code
        (Path(folder) / f"error-{local_rank}").write_text(f"{time.time()}\n{failure.message}")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def describe(error: BaseException) -> Failure:
    """Returns the message and the exit code of an error: rejected input has no traceback."""
    if isinstance(error, InputError | MisconfigurationException):
        return Failure(f"error: {error}", 2)
    if isinstance(error, NonFiniteError):
        return Failure(f"error: {error}", 4)
    if isinstance(error, StoppedError):
        return Failure(f"stopped by {signal.Signals(error.signum).name}; the checkpoint is saved", 128 + error.signum)
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return Failure("", error.code)
    return Failure("".join(traceback.format_exception(error)).rstrip(), 1)


def _first_failure(
    processes: list[Any], folder: Path, status: RankStatus, timeout: float, received: list[int]
) -> Failure:
    """Returns the cause: a rank that a signal killed, otherwise the rank whose error came first."""
    codes = [process.exitcode for process in processes]  # None: still running
    reports = {}
    for rank in range(len(processes)):
        if (path := folder / f"error-{rank}").exists():
            first, rest = path.read_text().split("\n", 1)
            reports[rank] = float(first), rest

    def name(rank: int) -> str:
        return f"rank {rank} (process {processes[rank].pid}) in step {status.of(rank).step}"

    killed = [rank for rank, code in enumerate(codes) if code is not None and code < 0]
    if received and (killed or not reports):
        return Failure(f"stopped by {signal.Signals(received[0]).name}", 128 + received[0])
    if killed:
        return Failure(f"{name(killed[0])} was killed by {signal.Signals(-(codes[killed[0]] or 0)).name}", 3)
    if not reports:
        rank = next(rank for rank, code in enumerate(codes) if code)
        return Failure(f"{name(rank)} ended with exit code {codes[rank]}", 3)
    rank = min(reports, key=lambda each: reports[each][0])
    when, message = reports[rank]
    if (code := codes[rank]) not in (None, 1):
        return Failure(message, code)
    late = [each for each, its_code in enumerate(codes) if its_code is None]
    if late and when - status.of(rank).time >= timeout:
        return Failure(f"{', '.join(map(name, late))} did not take part in a collective for {timeout:g} s", 3)
    return Failure(f"{message}\n{name(rank)} failed: {message.splitlines()[-1]}", 3)
