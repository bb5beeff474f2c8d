"""Runs the command line in real processes, forked from the test process, which has imported everything already."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_mnist.cli import main

# The tests fork: no OpenMP threads may be running in this process.
torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def run_forked(work: Callable[[], int], folder: Path, timeout: float = 120) -> Done:
    """Runs `work` in a forked process, leader of its own group, which is ended after `timeout` seconds."""
    out, err = folder / "stdout.txt", folder / "stderr.txt"
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            for path, descriptor in ((out, 1), (err, 2)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail(f"still running after {timeout} s; stdout:\n{out.read_text()}\nstderr:\n{err.read_text()}")
        time.sleep(0.02)
    return Done(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())


def children_of(group: int) -> list[int]:
    """Returns the processes of a process group that are still there."""
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


class Program:
    """The command line, run in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0

    def __call__(self, *arguments: object, timeout: float = 120) -> Done:
        """Runs a command line and returns how it ended."""
        words = [str(argument) for argument in arguments]

        def work() -> int:
            os.chdir(self.folder)
            return main(words)

        return run_forked(work, self.folder, timeout)

    def train(self, *arguments: object, timeout: float = 240) -> Path:
        """Trains into a new run folder, which must end well, and returns the folder."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        done = self(*arguments, "--run-dir", folder, timeout=timeout)
        assert done.code == 0, done.out + done.err
        return folder


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.fixture(scope="session")
def shared_program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program(tmp_path_factory.mktemp("shared"))


def result_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "result.json").read_text()))


def weights_of(folder: Path, name: str = "last.ckpt") -> dict[str, torch.Tensor]:
    checkpoint = torch.load(folder / "checkpoints" / name, map_location="cpu", weights_only=True)
    return dict(checkpoint["state_dict"])


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
