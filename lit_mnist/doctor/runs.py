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

from lit_mnist.doctor.probes.install import STOP, rank_environment
from lit_mnist.doctor.spec import Spec

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
        return next(iter(self.of_kind("end")), {"reached_end": False, "initialized": False, "failures": [], "libraries": []})

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


class Ranks:
    """Interpreters that have imported the libraries, one per rank, which run the user's code in forks.

    Args:
        world_size: Number of ranks.
        folder: Temporary folder of the examination.
    """

    def __init__(self, world_size: int, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        self._zygotes = [self._start(rank) for rank in range(world_size)]
        self._preload(_PRELOADED)

    def preload(self, names: Sequence[str]) -> None:
        """Imports libraries before further runs, which then need not."""
        self._preload(tuple(names))

    def run(self, spec: Spec, environment: dict[str, str] | None = None) -> Run:
        """Runs a specification to its end or timeout."""
        begun = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"run{self._number}-", dir=self.folder))
        self._number += 1
        spec.write(folder)
        port = _free_port()
        zygotes = self._zygotes[: spec.world_size]
        for rank, zygote in enumerate(zygotes):
            own = {**rank_environment(rank, spec.world_size, port), **(environment or {})}
            _tell(zygote, {"folder": str(folder), "environment": own})
        pids = [cast(int, _answer(zygote, 30.0)["pid"]) for zygote in zygotes]
        codes, hung = self._wait(zygotes, pids, folder, begun + spec.timeout)
        records = [_record(folder, rank, code) for rank, code in enumerate(codes)]
        return Run(spec, folder, records, hung, time.monotonic() - begun)

    def close(self) -> None:
        """Ends the interpreters."""
        for zygote in self._zygotes:
            zygote.kill()
            zygote.wait()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            # Sets have another order on each rank.
            "PYTHONHASHSEED": str(rank + 1),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-m", "lit_mnist.doctor.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            bufsize=1,
        )

    def _preload(self, names: Sequence[str]) -> None:
        for zygote in self._zygotes:
            _tell(zygote, {"preload": list(names)})
        for zygote in self._zygotes:
            _answer(zygote, 300.0)

    def _wait(
        self, zygotes: Sequence[subprocess.Popen[str]], pids: list[int], folder: Path, deadline: float
    ) -> tuple[list[int | None], bool]:
        codes: dict[int, int] = {}
        failed_at, hung = None, False
        while len(codes) < len(pids):
            for rank, zygote in enumerate(zygotes):
                if rank not in codes and select.select([zygote.stdout], [], [], 0.01)[0]:
                    codes[rank] = _answer(zygote, 5.0)["code"]
            now = time.monotonic()
            if failed_at is None and any(codes.values()):
                failed_at = now
            done = [(folder / f"done{rank}").exists() or rank in codes for rank in range(len(pids))]
            late = failed_at is not None and now > failed_at + _GRACE
            if all(done) or late or now > deadline:
                hung = not all(done) and not late
                break
        recorded = {rank for rank in range(len(pids)) if rank in codes}
        stop_ranks([pid for rank, pid in enumerate(pids) if rank not in codes], folder)
        for rank, zygote in enumerate(zygotes):
            if rank not in codes:
                codes[rank] = _answer(zygote, 30.0)["code"]
        return [codes[rank] if rank in recorded else None for rank in range(len(pids))], hung


def stop_ranks(pids: Sequence[int], folder: Path) -> None:
    """Lets ranks that hang write their records and stacks, and kills them."""
    if not pids:
        return
    (folder / STOP).touch()
    unfinished = [pid for pid in pids if pid > 0]
    for pid in unfinished:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR2)
    time.sleep(0.5)
    for pid in unfinished:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _tell(zygote: subprocess.Popen[str], request: dict[str, Any]) -> None:
    assert zygote.stdin is not None
    zygote.stdin.write(json.dumps(request) + "\n")
    zygote.stdin.flush()


def _answer(zygote: subprocess.Popen[str], timeout: float) -> dict[str, Any]:
    assert zygote.stdout is not None
    if not select.select([zygote.stdout], [], [], timeout)[0]:
        raise TimeoutError("An interpreter of the doctor does not answer.")
    line = zygote.stdout.readline()
    if not line:
        raise RuntimeError("An interpreter of the doctor has ended.")
    return cast(dict[str, Any], json.loads(line))


def _record(folder: Path, rank: int, code: int | None) -> RankRecord:
    path = folder / f"rank{rank}.pt"
    loaded = torch.load(path, weights_only=True) if path.exists() else {"events": [], "tensors": {}}
    return RankRecord(rank, loaded["events"], loaded["tensors"], _text(folder / f"output{rank}.txt"), _text(folder / f"stack{rank}.txt"), code)


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def remove(folder: Path) -> None:
    """Removes a temporary folder."""
    shutil.rmtree(folder, ignore_errors=True)
