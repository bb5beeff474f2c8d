"""What the tests share: the command line run in real processes, forked from this one, which has imported already."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from benchmarks.command import main as bench
from lit_mnist.cli.main import main
from lit_mnist.data.dataset import Dataset, load_dataset
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

pytest_plugins = ["needs"]

# The tests are of processors, also where there are GPUs; those of GPUs take them out of here. The other processes of
# pytest-xdist find them put away already.
_ALL = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
GPUS = [number for number in os.environ.setdefault("LIT_MNIST_TEST_GPUS", _ALL).split(",") if number]
os.environ["CUDA_VISIBLE_DEVICES"] = ""

# The tests fork: no OpenMP threads may be running in this process.
torch.set_num_threads(1)

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


@contextmanager
def forked(work: Callable[[], int], folder: Path) -> Iterator[int]:
    """Runs `work` in a forked process, leader of its own group; what is left of the group is killed at the end."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.setsid()
            for name, descriptor in (("stdout.txt", 1), ("stderr.txt", 2)):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            # A test may have taken them away; this process must end here all the same.
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


def run_forked(work: Callable[[], int], folder: Path, timeout: float = 120) -> Done:
    """Runs `work` in a forked process to its end, which must come within `timeout` seconds and leave no process."""
    with forked(work, folder) as child:
        status = wait_for(lambda: _ended(child), timeout, folder)
        left = processes_of(child)
    out, err = ((folder / name).read_text() for name in ("stdout.txt", "stderr.txt"))
    assert not left, f"processes left: {left}\n{out}{err}"
    return Done(os.waitstatus_to_exitcode(status[1]), out, err)


def _ended(child: int) -> tuple[int, int] | None:
    found, status = os.waitpid(child, os.WNOHANG)
    return (found, status) if found else None


Value = TypeVar("Value")


def wait_for(condition: Callable[[], Value], timeout: float, folder: Path | None = None) -> Value:
    """Returns what `condition` gives as soon as it is true."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            told = "".join(path.read_text() for path in folder.glob("std*.txt")) if folder else ""
            pytest.fail(f"nothing after {timeout} s\n{told}")
        time.sleep(0.02)
    return value


def processes_of(group: int) -> list[int]:
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


def ranks_of(group: int, pids: list[int] | None = None) -> dict[int, int]:
    """Returns the processes of a running command's ranks, by default those of its process group."""
    found = {}
    for pid in processes_of(group) if pids is None else pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if (name := re.fullmatch(r"rank-(\d+)\.log", entry.readlink().name)) and pid != group:
                        found[int(name[1])] = pid
    return found


def on_ranks(work: Callable[[Rank], None], folder: Path, world_size: int) -> None:
    """Runs `work` on ranks that have joined a group, forked from a forked process; its errors are the test's."""

    def joined(rank: Rank) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        work(rank)

    def start() -> int:
        launch(joined, world_size=world_size, max_restarts=0, logs=folder / "logs")
        return 0

    done = run_forked(start, folder, 60)
    assert done.code == 0, done.out + done.err


class Program:
    """The command line, run in a temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = 0

    def __call__(self, *arguments: object, engine: str = "lightning", timeout: float = 120) -> Done:
        """Runs a command line and returns how it ended."""
        return run_forked(self._work(arguments, engine), self.folder, timeout)

    def started(self, *arguments: object, engine: str = "lightning") -> AbstractContextManager[int]:
        """Starts a command line, and gives its process group."""
        return forked(self._work(arguments, engine), self.folder)

    def _work(self, arguments: tuple[object, ...], engine: str) -> Callable[[], int]:
        def work() -> int:
            os.chdir(self.folder)
            words = [str(argument) for argument in arguments]
            return bench(words) if engine == "benchmarks" else main(words, engine=engine)

        return work

    def train(self, *arguments: object, engine: str = "lightning", timeout: float = 240) -> Path:
        """Trains into a new run folder, which must end well, and returns the folder."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        done = self(*arguments, "--run-dir", folder, engine=engine, timeout=timeout)
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


TIMEOUT = 120
NOBODY = 65534
CHILD_ENV = {**os.environ, "PYTHONPATH": str(ROOT), "no_proxy": "*"}


def child(script: str, *args: str, **env: str) -> dict[str, Any]:
    command = [sys.executable, "-c", script, *args]
    environment = {**CHILD_ENV, **env}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@contextmanager
def as_nobody() -> Iterator[None]:
    """The superuser may read everything, so for a while the tests are somebody else.

    That one may not be able to import: what is needed must have been loaded before, as the fixture `embedded` does.
    """
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter, as pytest's own are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def embedded() -> Dataset:
    return load_dataset()


def assert_same(first: Dataset, second: Dataset) -> None:
    assert first.sha256 == second.sha256
    for a, b in ((first.train, second.train), (first.test, second.test)):
        torch.testing.assert_close(a.images, b.images, rtol=0, atol=0)
        torch.testing.assert_close(a.labels, b.labels, rtol=0, atol=0)


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
