"""Runs modules and functions in an interpreter per rank, and commands, which start their ranks themselves."""

import importlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

from ddp_doctor.errors import DoctorError, InputError
from ddp_doctor.files.protection import Protection
from ddp_doctor.processes import check_signals
from ddp_doctor.records.run import Run, load_run
from ddp_doctor.records.spec import STOP, WRITTEN, Spec, Target

# Seconds that the other ranks may still run after one has failed, and in which they write their records at a timeout.
_GRACE = _SECONDS_TO_RECORD = 5.0
# Seconds that a command may still need after all ranks have recorded their end.
_GRACE_OF_COMMAND = 10.0
_OF_A_GPU = re.compile(r"cuda|gpu|nccl|accelerator", re.IGNORECASE)
# Lines of a traceback, with its message.
_LAST_LINES = 4
_PRELOADED = ("torch", "torch.distributed", "torch.utils.data", "ddp_doctor.probes.install")
_OF_COMMAND = (*_PRELOADED, "torch._dynamo", "torch.distributed.run", "ddp_doctor.launch.starters")


class Interpreter:
    """An interpreter that has imported the libraries, and runs the user's code in forks; see `fork_server`."""

    def __init__(self, rank: int, folder: Path) -> None:
        environment = {
            **os.environ,
            # Sets have another order on each rank.
            "PYTHONHASHSEED": str(rank + 1),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            # Libraries write there when they are imported.
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

    def preload(self, names: Sequence[str], variables: dict[str, str]) -> None:
        """Lets it import libraries meanwhile, with these environment variables."""
        self._connection.send({"preload": names, "variables": variables})

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request, which comes after all imports."""
        self._connection.send(request)
        return self.wait()

    def wait(self) -> dict[str, Any]:
        """Returns the next answer.

        Raises:
            DoctorError: The interpreter was lost.
        """
        while not self.answers(1.0):
            check_signals()
        try:
            return cast(dict[str, Any], self._connection.recv())
        except EOFError as error:
            raise DoctorError("A process of the doctor was killed, perhaps for want of memory.") from error

    def answers(self, timeout: float) -> bool:
        """Returns whether an answer comes within some seconds."""
        return self._connection.poll(timeout)

    def close(self) -> None:
        """Ends the interpreter and what it runs."""
        with self._process:
            self._process.terminate()


class Runner:
    """Runs what is examined.

    Attributes:
        forks: Whether the Python programs of a command are run in forks of a process that has imported torch.
    """

    def __init__(self, target: Target, devices: int, folder: Path, protection: Protection) -> None:
        self.folder, self.protection, self.command = folder, protection, target.command
        self.interpreters = [Interpreter(rank, folder) for rank in range(2 if self.command else devices)]
        self.preload(_OF_COMMAND if self.command else _PRELOADED)
        self.forks = False
        self._numbers = itertools.count()

    def preload(self, names: Sequence[str], variables: dict[str, str] | None = None) -> None:
        """Imports libraries before further runs, which then need not, with the variables that the program has set."""
        # The first interpreter of a command starts it as it is, in new ones.
        for interpreter in self.interpreters[bool(self.command) :]:
            interpreter.preload(names, variables or {})

    def run(self, spec: Spec) -> Run:
        """Runs a specification to its end or timeout.

        Raises:
            InputError: The command does not exist.
        """
        forks = self.forks and not spec.real_gpus and spec.purpose != "bare"
        found = self._run(spec, forks=forks)
        if not forks or found.worked:
            return found
        # Only the command as it is tells why.
        self.forks = False
        return self._run(spec, forks=False)

    def _run(self, spec: Spec, *, forks: bool) -> Run:
        folder = Path(tempfile.mkdtemp(prefix=f"run{next(self._numbers)}-", dir=self.folder))
        # On a busy machine, a slow run is no hang.
        timeout = spec.timeout * min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))
        replace(spec, timeout=timeout).write(folder)
        guarded = self.protection.begin(spec, self._make_view)
        words = _words(self.command) if self.command else []
        request = {**guarded, "folder": str(folder), "command": words, "forks": forks}
        gpus = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")} if spec.real_gpus else {}
        running = {}
        for interpreter, own in self._environments(spec, forks=forks).items():
            environment = {**own, **gpus, **guarded["environment"]}
            running[int(interpreter.ask({**request, "environment": environment})["pid"])] = interpreter
        begun = time.monotonic()
        # While they run: it reads their records.
        importlib.import_module("torch")
        # Of a repetition, only the records count. A command does not end of itself as soon as the numbers are recorded.
        at_once = not self.command or spec.purpose == "numbers" or spec.interventions
        codes, hung = _wait(running, spec.world_size, folder, timeout, 0.0 if at_once else _GRACE_OF_COMMAND)
        if self.command:
            codes *= spec.world_size
        return load_run(spec, folder, codes, time.monotonic() - begun, hung=hung)

    def _environments(self, spec: Spec, *, forks: bool) -> dict[Interpreter, dict[str, str]]:
        """Returns the environment variables of what is started in each interpreter; an empty value removes one."""
        if self.command:
            return {self.interpreters[forks]: {"RANK": "", **_hash_seed()}}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        ranks = enumerate(self.interpreters[: spec.world_size])
        return {interpreter: _environment(rank, spec.world_size, port) for rank, interpreter in ranks}

    def close(self) -> None:
        """Ends the interpreters with what they run."""
        for interpreter in self.interpreters:
            interpreter.close()

    def _make_view(self, folder: Path, layers: Path) -> dict[str, Any]:
        return self.interpreters[0].ask({"view": [str(folder), str(layers)]})


def _wait(
    running: dict[int, Interpreter], world_size: int, folder: Path, timeout: float, grace: float
) -> tuple[list[int | None], bool]:
    """Waits for processes, and stops those that are late; returns the exit codes of the others, and whether it hung."""
    codes: dict[int, int | None] = dict.fromkeys(running)
    latest = deadline = time.monotonic() + timeout
    recorded = False
    while None in codes.values() and time.monotonic() <= latest:
        for pid, interpreter in running.items():
            if codes[pid] is None and interpreter.answers(0.01):
                codes[pid] = interpreter.wait()["code"]
                if codes[pid]:
                    latest = min(latest, time.monotonic() + _GRACE)
        check_signals()
        if not recorded and all((folder / f"done{rank}").exists() for rank in range(world_size)):
            recorded, latest = True, min(latest, time.monotonic() + grace)
    late = [pid for pid in running if codes[pid] is None]
    if late and not recorded:
        _let_record(folder, world_size)
    for pid in late:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        running[pid].wait()
    return [*codes.values()], bool(late) and latest == deadline


def _let_record(folder: Path, world_size: int) -> None:
    """Lets the ranks write their records and stacks."""
    (folder / STOP).touch()
    # A busy machine needs more than a moment; a rank that was lost writes nothing.
    latest = time.monotonic() + _SECONDS_TO_RECORD
    while time.monotonic() < latest and len(list(folder.glob(f"{WRITTEN}*"))) < world_size:
        time.sleep(0.1)
    time.sleep(0.5)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Returns the environment of a rank, as torchrun sets it."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "GROUP_RANK": 0, "MASTER_PORT": port}
    world = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    numbers = {name: str(number) for name, number in {**local, **world}.items()}
    return {**numbers, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "doctor"}


def _hash_seed() -> dict[str, str]:
    """Returns the variables with which each rank orders sets differently, but alike in all runs; see sitecustomize."""
    own = os.environ.get("PYTHONHASHSEED")
    return {"PYTHONHASHSEED": own} if own else {"PYTHONHASHSEED": "1", "DDP_DOCTOR_HASH_SEED": "1"}


def _words(command: Sequence[str]) -> list[str]:
    """Returns the words of a command, with the path of its program.

    Raises:
        InputError: There is no such program.
    """
    if command[0] in {"python", "python3"}:
        return [sys.executable, *command[1:]]
    found = shutil.which(command[0]) or shutil.which(command[0], path=str(Path(sys.executable).parent))
    if found is None:
        raise InputError(f"There is no command {command[0]}.")
    return [found, *command[1:]]


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


def emulation_for(spec: Spec, runs: Iterable[Run]) -> dict[str, Any]:
    """Returns the changes of a specification with which code may run that failed; empty if there are none."""
    needed = spec.may_emulate and not spec.gpus and any(map(_needs_gpu, runs))
    return {"gpus": spec.world_size} if needed else {}


def _needs_gpu(run: Run) -> bool:
    """Returns whether a run may have failed for want of a GPU, or did nothing without one."""
    if run.errors:
        return any(_OF_A_GPU.search(error["message"] + _end_of(error["trace"])) for error in run.errors)
    # A program that starts as many ranks as there are GPUs, or that ends with a message.
    return run.ended_early or bool(run.lost and not run.hung and _OF_A_GPU.search(run.short_reason))


def _end_of(trace: str) -> str:
    """Returns the last lines of the code in a traceback; the paths may name a GPU by chance."""
    lines = [line for line in trace.splitlines() if not line.lstrip().startswith("File ")]
    return "\n".join(lines[-_LAST_LINES:])
