"""Runs commands and ranks in processes forked from this one, which has imported everything already."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from prepared import prepare, use_prepared

from lit_mnist.cli.entry import freeze
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import LitMnistError

ROOT = Path(__file__).parents[1]
# Loopback addresses in the format of the kernel's tables.
LOOPBACK_V4 = "0100007F"
LOOPBACK = {LOOPBACK_V4, "00000000000000000000000001000000"}


@dataclass(frozen=True)
class Done:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


@contextmanager
def forked(work: Callable[[], int], folder: Path) -> Iterator[int]:
    """Runs `work` in a forked process with its own process group, which is killed at the end."""
    prepare()
    child = os.fork()
    if child == 0:
        code = 99
        use_prepared()
        # What this process has imported is neither searched for garbage here nor copied for that.
        freeze()
        try:
            os.setsid()
            for name, descriptor in (("stdout.txt", 1), ("stderr.txt", 2)):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            # This process must end here even if the test has closed the streams.
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(code)
    try:
        yield child
    finally:
        for pid in processes_of(child):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)


_SECONDS_TO_END = 3.0


def run_forked(work: Callable[[], int], folder: Path, timeout: float = 120) -> Done:
    """Runs `work` in a forked process, which must exit within `timeout` seconds and leave no process."""
    with forked(work, folder) as child:
        status = wait_for(lambda: _ended(child), timeout, folder)
        # The tracker of multiprocessing ends as soon as it reads that its owner has ended.
        deadline = time.monotonic() + _SECONDS_TO_END
        while (left := processes_of(child)) and time.monotonic() < deadline:
            time.sleep(0.02)
    out, err = ((folder / name).read_text() for name in ("stdout.txt", "stderr.txt"))
    assert not left, f"processes left: {left}\n{out}{err}"
    return Done(os.waitstatus_to_exitcode(status[1]), out, err)


def _ended(child: int) -> tuple[int, int] | None:
    found, status = os.waitpid(child, os.WNOHANG)
    return (found, status) if found else None


Value = TypeVar("Value")


def wait_for(condition: Callable[[], Value], timeout: float, folder: Path | None = None) -> Value:
    """Returns the value of `condition` as soon as it is true."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            told = "".join(path.read_text() for path in folder.glob("std*.txt")) if folder else ""
            pytest.fail(f"timed out after {timeout} s\n{told}")
        time.sleep(0.02)
    return value


def processes_of(group: int) -> list[int]:
    """Returns the running processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == group and fields[0] != "Z":
                found.append(int(entry.name))
    return found


def ranks_of(group: int, pids: list[int] | None = None) -> dict[int, int]:
    """Returns the process ID of each rank of a running command, by default among its process group."""
    found = {}
    for pid in processes_of(group) if pids is None else pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if (name := re.fullmatch(r"rank-(\d+)\.log", entry.readlink().name)) and pid != group:
                        found[int(name[1])] = pid
    return found


def on_ranks(work: Callable[[Rank], None], folder: Path, world_size: int) -> None:
    """Runs `work` on ranks that have joined a process group. An error of a rank fails the test."""

    def joined(rank: Rank) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        work(rank)

    def start() -> int:
        launch(joined, world_size=world_size, max_restarts=0, logs=folder / "logs")
        return 0

    done = run_forked(start, folder, 60)
    assert done.code == 0, done.out + done.err


def assert_rejected(done: Done, *parts: str) -> None:
    """Asserts that a command was rejected with a single message that contains all parts."""
    assert done.code == 2, done.out + done.err
    assert "Traceback" not in done.err
    assert done.err.startswith("error: ")
    assert len(done.err.strip().splitlines()) == 1, done.err
    for part in parts:
        assert part in done.err, done.err


def files_of(folder: Path) -> dict[str, tuple[object, ...]]:
    """Returns the files and folders in a folder: names, types, times, and the content of small files.

    The output of the command itself, Python's caches of imported packages, and the cache of data files that were
    checked are not included.
    """
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        is_cache = "__pycache__" in path.parts or path.relative_to(folder).parts[0] == "cache"
        if path.name not in {"stdout.txt", "stderr.txt"} and not is_cache:
            entry = path.lstat()
            kind: tuple[object, ...] = (stat.S_IFMT(entry.st_mode), stat.S_IMODE(entry.st_mode))
            if stat.S_ISREG(entry.st_mode):
                small = entry.st_size <= 1 << 20
                kind += (entry.st_size, entry.st_mtime_ns, path.read_bytes() if small else entry.st_ino)
            found[str(path.relative_to(folder))] = kind
    return found


def launched(work: Callable[[Rank], None], folder: Path, *, world_size: int, max_restarts: int = 0) -> Done:
    """Launches ranks from a forked process, which prints the error of the launch."""

    def start() -> int:
        try:
            launch(work, world_size=world_size, max_restarts=max_restarts, logs=folder / "logs")
        except LitMnistError as error:
            print(error)
            return error.exit_code
        return 0

    return run_forked(start, folder, 30)


def torchrun(folder: Path, *words: object, restarts: int = 0, script: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Starts two ranks with torchrun in a new process group."""
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    program = ("--max-restarts", restarts, *(script or ("-m", "lit_mnist.engines.raw_ddp")), "--run-dir", folder)
    return subprocess.Popen(
        list(map(str, (*command, *program, *words))), cwd=ROOT, start_new_session=True, text=True,
        stdout=subprocess.DEVNULL, stderr=(folder.parent / f"{folder.name}.err").open("w"),
    )  # fmt: skip


def named(folder: Path) -> list[int]:
    """Returns the processes with a run folder on their command line, since each rank of torchrun has its own group.

    A fork that stands for a Python program has a file of that name; see `forked_python`.
    """
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and (
                str(folder).encode() in (entry / "cmdline").read_bytes().split(b"\0")
                or any(f"/memfd:{folder} (deleted)" == str(file.readlink()) for file in (entry / "fd").iterdir())
            ):
                found.append(int(entry.name))
    return found


def listening(pids: list[int]) -> list[str]:
    """Returns the addresses on which processes listen, in the format of the kernel's tables."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            # The descriptor may have been closed.
            with suppress(FileNotFoundError):
                target = str(entry.readlink())
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                found.append(fields[1].rpartition(":")[0])
    return found


def kill(pid: int, signum: signal.Signals) -> None:
    """Sends a signal to a process that may have exited."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
