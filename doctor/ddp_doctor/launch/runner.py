"""Runs modules and functions, in an interpreter per rank."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

from ddp_doctor.files.protection import Protection
from ddp_doctor.probes.install import STOP, WRITTEN
from ddp_doctor.processes import check_signals
from ddp_doctor.records.run import Run, load_run
from ddp_doctor.records.spec import Spec

# Seconds that the other ranks may still run after one has failed, and in which they write their records at a timeout.
_GRACE = _SECONDS_TO_RECORD = 5.0
_PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "ddp_doctor.probes.install")
# The exit codes of the processes, None for those that were stopped, and whether they hung.
Ended = tuple[list[int | None], bool]


class Interpreter:
    """An interpreter that has imported the libraries, and runs the user's code in forks; see `fork_server`.

    Args:
        rank: Rank of its runs; sets have another order on each rank.
        folder: Folder of the examination, for what libraries write when they are imported.

    Attributes:
        tell: Sends a request.
        answers: Returns whether an answer comes within some seconds.
    """

    def __init__(self, rank: int, folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(rank + 1),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(folder),
        }
        self._connection, theirs = Pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ddp_doctor.launch.fork_server", str(theirs.fileno())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # Ctrl-C is for the command alone, which ends its runs.
            start_new_session=True,
        )
        theirs.close()
        self.tell, self.answers = self._connection.send, self._connection.poll

    def wait(self, timeout: float = 60.0) -> dict[str, Any]:
        """Returns the next answer.

        Raises:
            RuntimeError: There is none in time.
        """
        if not self.answers(timeout):
            raise RuntimeError("An interpreter of the doctor does not answer.")
        return cast(dict[str, Any], self._connection.recv())

    def close(self) -> None:
        """Ends the interpreter and what it runs."""
        with self._process:
            self._process.terminate()


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
        self.interpreters = [Interpreter(rank, folder) for rank in range(count)]
        self.forks = False
        self._numbers = itertools.count()

    def preload(self, names: Sequence[str] = _PRELOADED) -> None:
        """Imports libraries before further runs, which then need not."""
        for interpreter in self.interpreters:
            interpreter.tell({"preload": list(names)})
        for interpreter in self.interpreters:
            interpreter.wait(300.0)

    def use_forks(self) -> None:
        """Lets further runs of a command be forks; others are forks from the start."""

    def run(self, spec: Spec) -> Run:
        """Runs a specification to its end or timeout."""
        begun, folder = time.monotonic(), self.new_folder()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        ranks = {
            interpreter: _environment(rank, spec.world_size, port)
            for rank, interpreter in enumerate(self.interpreters[: spec.world_size])
        }
        codes, hung = self.execute(spec, folder, ranks)
        return load_run(spec, folder, codes, time.monotonic() - begun, hung=hung)

    def new_folder(self) -> Path:
        """Returns the folder of the next run."""
        return Path(tempfile.mkdtemp(prefix=f"run{next(self._numbers)}-", dir=self.folder))

    def execute(
        self,
        spec: Spec,
        folder: Path,
        environments: dict[Interpreter, dict[str, str]],
        command: Sequence[str] = (),
        grace: float = 0.0,
        *,
        forks: bool = False,
    ) -> Ended:
        """Starts a process in each of some interpreters, and waits until they end or are stopped.

        Args:
            spec: The run.
            folder: Its folder.
            environments: Environment variables of each process; an empty value removes one.
            command: What is run instead of the target.
            grace: Seconds that the processes may still need after all ranks have recorded their end.
            forks: Whether the Python programs of the command are run in forks of the interpreter.
        """
        # On a busy machine, a slow run is no hang.
        spec = replace(spec, timeout=spec.timeout * min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))))
        deadline = time.monotonic() + spec.timeout
        spec.write(folder)
        guarded = self.protection.begin(spec, self._make_view)
        request = {**guarded, "folder": str(folder), "command": list(command), "forks": forks}
        gpus = {"CUDA_VISIBLE_DEVICES": _visible_gpus()} if spec.real_gpus else {}
        pids = []
        for interpreter, own in environments.items():
            interpreter.tell({**request, "environment": {**own, **gpus, **guarded["environment"]}})
            pids.append(int(interpreter.wait()["pid"]))
        return _wait(dict(zip(pids, environments, strict=True)), spec, folder, deadline, grace)

    def close(self) -> None:
        """Ends the interpreters with what they run."""
        for interpreter in self.interpreters:
            interpreter.close()

    def _make_view(self, folder: Path, layers: Path) -> dict[str, Any]:
        self.interpreters[0].tell({"view": [str(folder), str(layers)]})
        return self.interpreters[0].wait()


def _wait(running: dict[int, Interpreter], spec: Spec, folder: Path, deadline: float, grace: float) -> Ended:
    """Waits for processes, and stops those that are late."""
    codes: dict[int, int | None] = dict.fromkeys(running)
    latest, recorded = deadline, False
    while None in codes.values() and time.monotonic() <= latest:
        for pid, interpreter in running.items():
            if codes[pid] is None and interpreter.answers(0.01):
                codes[pid] = interpreter.wait()["code"]
                if codes[pid]:
                    latest = min(latest, time.monotonic() + _GRACE)
        check_signals()
        if not recorded and all((folder / f"done{rank}").exists() for rank in range(spec.world_size)):
            recorded, latest = True, min(latest, time.monotonic() + grace)
    late = [pid for pid in running if codes[pid] is None]
    if late and not recorded:
        _let_record(spec, folder)
    for pid in late:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        running[pid].wait()
    return [*codes.values()], bool(late) and latest == deadline


def _let_record(spec: Spec, folder: Path) -> None:
    """Lets the ranks write their records and stacks."""
    (folder / STOP).touch()
    # A busy machine needs more than a moment; a rank that was lost writes nothing.
    latest = time.monotonic() + _SECONDS_TO_RECORD
    while time.monotonic() < latest and len(list(folder.glob(f"{WRITTEN}*"))) < spec.world_size:
        time.sleep(0.1)
    time.sleep(0.5)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the environment of a rank, as torchrun sets it."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0, "MASTER_PORT": port}
    world = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    numbers = {name: str(number) for name, number in {**local, **world}.items()}
    return {**numbers, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "doctor"}


def _visible_gpus() -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES with which a process sees the GPUs that this one sees."""
    import torch

    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))


def device_changes(devices: int, gpu_as_cpu: bool | None, available: int) -> dict[str, int | bool]:
    """Returns the fields of a specification that say where code for GPUs is run.

    Args:
        devices: Number of ranks.
        gpu_as_cpu: Whether GPUs are emulated; None to do so if the code needs one and the machine has too few. False
            also lets ranks share the GPUs of a machine that has fewer than ranks.
        available: Number of GPUs of the machine.
    """
    enough = available >= devices or (gpu_as_cpu is False and available > 0)
    if gpu_as_cpu is not True and enough:
        return {"real_gpus": True}
    return {"gpus": devices if gpu_as_cpu else 0, "may_emulate": gpu_as_cpu is not False}
