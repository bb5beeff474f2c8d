"""Runs a target on several ranks."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ddp_doctor.files.protection import Protection
from ddp_doctor.launch.interpreter import Interpreter
from ddp_doctor.probes.install import STOP, rank_environment
from ddp_doctor.processes import processes_of_group
from ddp_doctor.records.run import Run, load_record
from ddp_doctor.records.spec import Spec
from ddp_doctor.stop import check_signals

# Seconds that the other ranks may still run after one has failed.
_GRACE = 5.0
_PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "ddp_doctor.probes.install")


class Ranks:
    """One interpreter per rank.

    Args:
        world_size: Number of ranks.
        folder: Temporary folder of the examination.
        protection: Keeps the runs from the user's files.
    """

    def __init__(self, world_size: int, folder: Path, protection: Protection) -> None:
        self.folder, self.protection = folder, protection
        self._number = 0
        self._interpreters = [Interpreter(rank, folder) for rank in range(world_size)]
        self.preload(_PRELOADED)

    def why_not_alone(self, spec: Spec) -> str:
        """Returns nothing: modules and functions run on any number of ranks."""
        return ""

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
        guarded = self.protection.begin(spec, interpreters[0].make_view)
        pids = []
        for rank, interpreter in enumerate(interpreters):
            own = {**rank_environment(rank, spec.world_size, port), **(environment or {}), **guarded["environment"]}
            pids.append(interpreter.begin({**guarded, "folder": str(folder), "environment": own}))
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
            check_signals()
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


def stop_ranks(pids: Sequence[int], folder: Path, *, record: bool) -> None:
    """Kills ranks with their children.

    Args:
        pids: Their process IDs, which are those of their process groups.
        folder: Folder of the run.
        record: Whether they write their records and stacks before.
    """
    if pids and record:
        (folder / STOP).touch()
        for pid in pids:
            for member in processes_of_group(pid):
                with suppress(ProcessLookupError):
                    os.kill(member, signal.SIGUSR2)
        time.sleep(1.0)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
