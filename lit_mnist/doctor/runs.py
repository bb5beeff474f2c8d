"""Runs a target on several ranks, and collects what they recorded."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from lit_mnist.distributed.signals import STOP
from lit_mnist.doctor.probes.install import STOP as STOP_FILE
from lit_mnist.doctor.probes.install import rank_environment
from lit_mnist.doctor.processes import processes_of_group
from lit_mnist.doctor.spec import Spec, Target
from lit_mnist.errors import StoppedError

# Seconds that the other ranks may still run after one has failed.
_GRACE = 5.0
_PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "lit_mnist.doctor.probes.install")


@dataclass
class RankRecord:
    """What one rank recorded.

    Attributes:
        rank: Its number.
        events: Its events, in order.
        tensors: Its tensors.
        output: What it printed.
        stack: The stacks of its threads if it hung.
        code: Its exit code; None for a rank that was stopped after it had recorded everything.
    """

    rank: int
    events: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    output: str = ""
    stack: str = ""
    code: int | None = None

    def of_kind(self, *kinds: str) -> list[dict[str, Any]]:
        """Returns the events of some kinds, in order."""
        return [event for event in self.events if event["kind"] in kinds]

    @property
    def end(self) -> dict[str, Any]:
        """The last event: how the program ended."""
        return next(
            iter(self.of_kind("end")), {"reached_end": False, "initialized": False, "failures": [], "libraries": []}
        )

    @property
    def error(self) -> dict[str, Any] | None:
        """The exception that ended the program, if there was one."""
        return next(iter(self.of_kind("error")), None)

    @property
    def training_epochs(self) -> list[dict[str, Any]]:
        """The iterations of loaders in which the program trained, in order."""
        return [event for event in self.of_kind("epoch") if event["trains"]]

    @property
    def evaluation_epochs(self) -> list[dict[str, Any]]:
        """The other iterations of loaders, in order."""
        return [event for event in self.of_kind("epoch") if not event["trains"]]


@dataclass
class Run:
    """One run.

    Attributes:
        spec: What was to be done.
        folder: Its folder.
        ranks: The ranks, in order.
        hung: Whether it was stopped after the timeout.
        seconds: How long it took.
    """

    spec: Spec
    folder: Path
    ranks: list[RankRecord] = field(default_factory=list)
    hung: bool = False
    seconds: float = 0.0

    @property
    def errors(self) -> list[dict[str, Any]]:
        """The exceptions of the ranks."""
        return [rank.error for rank in self.ranks if rank.error]

    @property
    def lost(self) -> list[RankRecord]:
        """The ranks that ended without a record."""
        return [rank for rank in self.ranks if not rank.events]

    @property
    def worked(self) -> bool:
        """Whether every rank recorded what was wanted."""
        return not self.hung and not self.errors and not self.lost and bool(self.ranks)


class Interpreter:
    """An interpreter that has imported the libraries, and runs the user's code in forks.

    Args:
        rank: Rank of its runs; sets have another order on each rank.
    """

    def __init__(self, rank: int) -> None:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(rank + 1),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lit_mnist.doctor.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
            # Ctrl-C is for the command alone, which ends its runs.
            start_new_session=True,
        )
        self._pid = 0

    def tell(self, request: dict[str, Any]) -> None:
        """Sends a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")

    def answer(self, timeout: float) -> dict[str, Any] | None:
        """Returns the next answer; None if there is none in time."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("An interpreter of the doctor has ended.")
        found = cast(dict[str, Any], json.loads(line))
        if "code" in found:
            self._pid = 0
        return found

    def begin(self, request: dict[str, Any]) -> int:
        """Starts a run, and returns its process ID."""
        self.tell(request)
        self._pid = int(self.wait_for(60.0)["pid"])
        return self._pid

    def wait_for(self, timeout: float) -> dict[str, Any]:
        """Returns the next answer.

        Raises:
            RuntimeError: There is none in time.
        """
        found = self.answer(timeout)
        if found is None:
            raise RuntimeError("An interpreter of the doctor does not answer.")
        return found

    def close(self) -> None:
        """Ends the interpreter and what it runs."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
            with suppress(RuntimeError):
                # It ends the processes that are left.
                self.answer(10.0)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


class Ranks:
    """One interpreter per rank.

    Args:
        world_size: Number of ranks.
        folder: Temporary folder of the examination.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self._interpreters = [Interpreter(rank) for rank in range(world_size)]
        self.preload(_PRELOADED)

    def can_run_alone(self, target: Target) -> bool:
        """Returns whether the target can run on one process."""
        return True

    def preload(self, names: Sequence[str]) -> None:
        """Imports libraries before further runs, which then need not."""
        for interpreter in self._interpreters:
            interpreter.tell({"preload": list(names)})
        for interpreter in self._interpreters:
            interpreter.wait_for(300.0)

    def run(self, spec: Spec, environment: dict[str, str] | None = None) -> Run:
        """Runs a specification to its end or timeout."""
        begun = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"run{self._number}-", dir=self.folder))
        self._number += 1
        spec.write(folder)
        port = _free_port()
        interpreters = self._interpreters[: spec.world_size]
        pids = []
        for rank, interpreter in enumerate(interpreters):
            own = {**rank_environment(rank, spec.world_size, port), **(environment or {})}
            pids.append(interpreter.begin({"folder": str(folder), "environment": own}))
        codes, hung = self._wait(interpreters, pids, folder, begun + spec.timeout)
        records = [load_record(folder, rank, code) for rank, code in enumerate(codes)]
        return Run(spec, folder, records, hung, time.monotonic() - begun)

    def close(self) -> None:
        """Ends the interpreters."""
        for interpreter in self._interpreters:
            interpreter.close()

    def _wait(
        self, interpreters: Sequence[Interpreter], pids: list[int], folder: Path, deadline: float
    ) -> tuple[list[int | None], bool]:
        codes: dict[int, int] = {}
        failed_at, hung, ranks = None, False, range(len(pids))
        while len(codes) < len(pids):
            for rank, interpreter in enumerate(interpreters):
                if rank not in codes and (found := interpreter.answer(0.01)):
                    codes[rank] = found["code"]
            now = time.monotonic()
            if failed_at is None and any(codes.values()):
                failed_at = now
            check_signal()
            done = all((folder / f"done{rank}").exists() or rank in codes for rank in ranks)
            late = failed_at is not None and now > failed_at + _GRACE
            if done or late or now > deadline:
                hung = not done and not late
                break
        ended = dict(codes)
        stop_ranks([pid for rank, pid in enumerate(pids) if rank not in codes], folder, record=not done)
        for rank, interpreter in enumerate(interpreters):
            if rank not in codes:
                interpreter.wait_for(60.0)
        return [ended.get(rank) for rank in ranks], hung


def check_signal() -> None:
    """Raises a StoppedError if the command has received a signal; the runs are then ended."""
    if STOP.received_signal is not None:
        raise StoppedError(f"Stopped by {STOP.received_signal.name}.", STOP.received_signal)


def stop_ranks(pids: Sequence[int], folder: Path, *, record: bool) -> None:
    """Kills ranks with their children.

    Args:
        pids: Their process IDs, which are those of their process groups.
        folder: Folder of the run.
        record: Whether they write their records and stacks before.
    """
    if pids and record:
        (folder / STOP_FILE).touch()
        for pid in pids:
            for member in processes_of_group(pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGUSR2)
        time.sleep(1.0)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def load_record(folder: Path, rank: int, code: int | None) -> RankRecord:
    """Returns what a rank recorded, which is nothing if it was lost."""
    path = folder / f"rank{rank}.pt"
    loaded = torch.load(path, weights_only=True) if path.exists() else {"events": [], "tensors": {}}
    output, stack = _text(folder / f"output{rank}.txt"), _text(folder / f"stack{rank}.txt")
    return RankRecord(rank, loaded["events"], loaded["tensors"], output, stack, code)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def remove(folder: Path) -> None:
    """Removes a temporary folder."""
    shutil.rmtree(folder, ignore_errors=True)
