"""Starts ranks and commands from one prepared process, in which torch, Lightning and the project are imported.

Each is forked in a tenth of a second, ends when this process ends, and is killed with all that it started when its time
is over. The functions of `ranks` are found by name, so they must be at the top level of a test module.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["lightning.pytorch", "torchmetrics", "lit_mnist.cli", "lit_mnist.plugins"])


class Completed(NamedTuple):
    """What a command has done: its exit code (-N if signal N killed it), and its output with that of its ranks."""

    code: int
    output: str


class Command:
    """A running command, in a process group of its own."""

    def __init__(self, process: Any, output: Path) -> None:
        self.process, self.output, self.is_over = process, output, False

    @property
    def pid(self) -> int:
        """Its process ID, which is the ID of its process group."""
        return int(self.process.pid)

    def text(self) -> str:
        """Returns its output so far."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def wait_for(self, condition: Callable[[], Any], timeout: float = 60) -> Any:
        """Waits until a condition holds while the command runs, and returns its value."""
        deadline = time.monotonic() + timeout
        while not (value := condition()):
            assert self.process.is_alive(), f"the command has ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"it did not happen in {timeout} s:\n{self.text()}"
            time.sleep(0.01)
        return value

    def children(self) -> list[int]:
        """Returns the process IDs of its ranks."""
        found = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(pid) for pid in found]

    def wait(self, timeout: float = 120) -> Completed:
        """Waits for its end, and kills it if its time is over; no process of its group is left."""
        self.process.join(timeout)
        code = self.process.exitcode
        self.kill()
        assert code is not None, f"the command did not end in {timeout} s:\n{self.text()}"
        return Completed(code, self.text())

    def kill(self) -> None:
        """Kills all processes of the group, once: later, the ID may be that of others."""
        if not self.is_over:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.process.join()
            self.is_over = True


def start(words: list[str], output: Path, cwd: Path, environment: dict[str, str] | None = None) -> Command:
    """Starts `python train.py WORDS`, or with `-m MODULE` as the first words the main function of an engine."""
    process = CONTEXT.Process(target=_command, args=(words, output, cwd, environment or {}, os.getpid()))
    process.start()
    return Command(process, output)


def run_ranks(
    function: Callable[..., Any], count: int, args: tuple[Any, ...], folder: Path, timeout: float
) -> list[Any]:
    """Returns what `function(*args)` returns in each of `count` ranks of a gloo group."""
    folder.mkdir()
    starter = os.getpid()
    processes = [
        CONTEXT.Process(target=_rank, args=(function, rank, count, args, folder, starter)) for rank in range(count)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + timeout
    try:
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.01)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
    errors = "\n".join(path.read_text() for path in sorted(folder.glob("error-*")))
    assert codes == [0] * count, f"exit codes {codes} (None: not ended in {timeout} s)\n{errors}"
    return [torch.load(folder / f"value-{rank}", weights_only=False) for rank in range(count)]


def _begin(starter: int) -> None:
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the prepared process
    if not Path(f"/proc/{starter}").exists():
        os._exit(1)
    torch.set_num_threads(1)
    # The workers of a DataLoader are forked, as in a process of its own.
    multiprocessing.set_start_method("fork", force=True)


def _rank(
    function: Callable[..., Any], rank: int, count: int, args: tuple[Any, ...], folder: Path, starter: int
) -> None:
    _begin(starter)
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), NODE_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1", GLOO_SOCKET_IFNAME="lo")
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=60), rank=rank, world_size=count)
        value = function(*args)
        torch.save(value, folder / f"value-{rank}")
    except BaseException:
        (folder / f"error-{rank}").write_text(f"rank {rank}: {traceback.format_exc()}")
        os._exit(1)
    os._exit(0)  # without the exit handlers of a pytest process


def _command(words: list[str], output: Path, cwd: Path, environment: dict[str, str], starter: int) -> None:
    _begin(starter)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1), os.dup2(descriptor, 2)
    if environment.pop("BROKEN_STDOUT", ""):
        reading, writing = os.pipe()
        os.close(reading), os.dup2(writing, 1)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.path[:0] = [str(cwd), *environment.get("PYTHONPATH", "").split(":")]
    sys.dont_write_bytecode = True
    if words[:1] == ["-m"]:
        import importlib

        main, arguments = importlib.import_module(words[1]).main, words[2:]
    else:
        from lit_mnist.cli import main

        arguments = words
    sys.argv = ["train.py", *arguments]
    try:
        main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
