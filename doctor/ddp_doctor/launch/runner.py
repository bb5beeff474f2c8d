"""Runs a specification: a module or function in an interpreter per rank, or a command that starts its ranks itself."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ddp_doctor.files.protection import Protection
from ddp_doctor.launch.gpus import visible_gpus
from ddp_doctor.launch.interpreter import Interpreter
from ddp_doctor.probes.install import STOP
from ddp_doctor.processes import processes_of_group
from ddp_doctor.records.run import Run, load_record
from ddp_doctor.records.spec import Spec
from ddp_doctor.stop import check_signals

# Seconds that the other ranks may still run after one has failed.
_GRACE = 5.0
_SECONDS_TO_RECORD = 5.0
_PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "ddp_doctor.probes.install")
# The exit codes of the processes, None for those that were stopped, and whether they hung.
Ended = tuple[list[int | None], bool]


def slowdown() -> float:
    """Returns how many processes share a processor, from 1 to 10: on a busy machine, a slow run is no hang."""
    return min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


class Runner:
    """Runs modules and functions.

    Args:
        count: Number of interpreters.
        folder: Temporary folder of the examination.
        protection: Keeps the runs from the user's files.

    Attributes:
        forks: Whether the Python programs of a command are run in forks of a process that has imported torch.
    """

    def __init__(self, count: int, folder: Path, protection: Protection) -> None:
        self.folder, self.protection = folder, protection
        self._interpreters = [Interpreter(rank, folder) for rank in range(count)]
        self._numbers = itertools.count()
        self.forks = False

    def preload(self, names: Sequence[str] = _PRELOADED) -> None:
        """Imports libraries before further runs, which then need not."""
        for interpreter in self._interpreters:
            interpreter.tell({"preload": list(names)})
        for interpreter in self._interpreters:
            interpreter.wait_for(300.0)

    def use_forks(self) -> bool:
        """Lets further runs of a command be forks, and returns whether they are; others are forks from the start."""
        return False

    def run(self, spec: Spec, environment: dict[str, str] | None = None) -> Run:
        """Runs a specification to its end or timeout."""
        begun, folder = time.monotonic(), self.new_folder()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        ranks = [
            {**_rank_environment(rank, spec.world_size, port), **(environment or {})} for rank in range(spec.world_size)
        ]
        codes, hung = self.execute(spec, folder, ranks)
        return Run(
            spec, folder, [load_record(folder, *rank) for rank in enumerate(codes)], hung, time.monotonic() - begun
        )

    def new_folder(self) -> Path:
        """Returns the folder of the next run."""
        return Path(tempfile.mkdtemp(prefix=f"run{next(self._numbers)}-", dir=self.folder))

    def execute(
        self,
        spec: Spec,
        folder: Path,
        environments: Sequence[dict[str, str]],
        command: Sequence[str] = (),
        grace: float = 0.0,
    ) -> Ended:
        """Starts a process with each of the environments, and waits until they end or are stopped.

        Args:
            spec: The run.
            folder: Its folder.
            environments: Environment variables of each process; an empty value removes one.
            command: What is run instead of the target.
            grace: Seconds that the processes may still need after all ranks have recorded their end.
        """
        spec = replace(spec, timeout=spec.timeout * slowdown())
        deadline = time.monotonic() + spec.timeout
        spec.write(folder)
        guarded = self.protection.begin(spec, self._interpreters[0].make_view)
        if spec.real_gpus:
            environments = [{**own, "CUDA_VISIBLE_DEVICES": visible_gpus()} for own in environments]
        request = {**guarded, "folder": str(folder), "command": list(command), "forks": self.forks}
        pids = [
            interpreter.begin({**request, "environment": {**own, **guarded["environment"]}})
            for interpreter, own in zip(self._interpreters, environments, strict=False)
        ]
        return self._wait(pids, spec, folder, deadline, grace)

    def close(self) -> None:
        """Ends the interpreters with what they run."""
        for interpreter in self._interpreters:
            interpreter.close()

    def _wait(self, pids: Sequence[int], spec: Spec, folder: Path, deadline: float, grace: float) -> Ended:
        codes: dict[int, int | None] = {}
        failed_at = done_at = None
        running = dict(enumerate(self._interpreters[: len(pids)]))
        late = False
        while running and not late and (now := time.monotonic()) <= deadline:
            for number, interpreter in list(running.items()):
                if found := interpreter.answer(0.01):
                    codes[number] = found["code"]
                    del running[number]
            check_signals()
            if failed_at is None and any(codes.values()):
                failed_at = now
            if done_at is None and all(
                rank in codes or (folder / f"done{rank}").exists() for rank in range(spec.world_size)
            ):
                done_at = now
            late = any(at is not None and now > at + wait for at, wait in ((failed_at, _GRACE), (done_at, grace)))
        if running:
            stop_processes([pids[number] for number in running], folder, record=0 if done_at else spec.world_size)
            for interpreter in running.values():
                interpreter.wait_for(60.0)
        return [codes.get(number) for number in range(len(pids))], bool(running) and not late


def stop_processes(pids: Sequence[int], folder: Path, *, record: int) -> None:
    """Kills processes with their children.

    Args:
        pids: Their process IDs, which are those of their process groups.
        folder: Folder of the run.
        record: How many ranks write their records and stacks before.
    """
    if record:
        (folder / STOP).touch()
        for member in (member for pid in pids for member in processes_of_group(pid)):
            with suppress(ProcessLookupError):
                os.kill(member, signal.SIGUSR2)
        # A busy machine needs more than a moment; a rank that was lost writes nothing.
        latest = time.monotonic() + _SECONDS_TO_RECORD
        while time.monotonic() < latest and len(list(folder.glob("rank*.pt"))) < record:
            time.sleep(0.1)
        time.sleep(0.5)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the environment of a rank, as torchrun sets it."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0, "MASTER_PORT": port}
    world = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    numbers = {name: str(number) for name, number in {**local, **world}.items()}
    return {**os.environ, **numbers, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "doctor"}
