"""Processes of the doctor's tests."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.multiprocessing import start_processes

ROOT = Path(__file__).parents[1]
CHILD_ENV = {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "*"}


@dataclass(frozen=True)
class Done:
    """The exit code and the output of a process."""

    code: int
    out: str
    err: str


def run_forked(work: Callable[[], int], folder: Path, timeout: float = 280) -> Done:
    """Runs `work` in a forked process, which must end in time and leave no process of its group."""
    paths = [folder / name for name in ("stdout.txt", "stderr.txt")]
    child = os.fork()
    if child == 0:
        os.setsid()
        for path, descriptor in zip(paths, (1, 2), strict=True):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        _work(work)
    deadline = time.monotonic() + timeout
    try:
        while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
            time.sleep(0.02)
        # The tracker of multiprocessing ends as soon as it reads that its owner has ended.
        while (left := _members(child)) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
    out, err = (path.read_text() for path in paths)
    assert ended[0], f"timed out after {timeout} s\n{out}{err}"
    assert not left, f"processes left: {left}\n{out}{err}"
    return Done(os.waitstatus_to_exitcode(ended[1]), out, err)


def on_ranks(work: Callable[[int], None], folder: Path, world_size: int) -> None:
    """Runs `work(rank)` on ranks that have joined a process group. An error of a rank fails the test."""

    def start() -> int:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        start_processes(_rank, (world_size, f"file://{folder}/store", work), world_size, start_method="fork")
        return 0

    done = run_forked(start, folder, 60)
    assert done.code == 0, done.out + done.err


def _work(work: Callable[[], int]) -> None:
    code = 99
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        # This process must end here even if the test has closed the streams.
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _rank(rank: int, world_size: int, store: str, work: Callable[[int], None]) -> None:
    dist.init_process_group("gloo", store, timedelta(seconds=30), rank=rank, world_size=world_size)
    work(rank)
    dist.destroy_process_group()


def _members(group: int) -> list[int]:
    """Returns the running processes of a process group."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[2]) == group and fields[0] != "Z":
                    found.append(int(entry.name))
    return found
