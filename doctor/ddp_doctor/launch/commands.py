"""Runs a command that starts its ranks itself, with probes in each Python that it starts."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ddp_doctor.errors import InputError
from ddp_doctor.files.protection import Protection
from ddp_doctor.launch.runner import Runner
from ddp_doctor.records.run import Run, load_run
from ddp_doctor.records.spec import Spec

# Seconds that a command may still need after all ranks have recorded their end.
_GRACE = 10.0
# Without libraries that keep functions of torch under names of their own, which the probes would not replace.
_PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.run",
    "torch.utils.data",
    "ddp_doctor.launch.starters",
    "ddp_doctor.probes.install",
)


class CommandRunner(Runner):
    """Runs commands.

    Args:
        folder: Temporary folder of the examination.
        protection: Keeps the runs from the user's files.
    """

    def __init__(self, folder: Path, protection: Protection) -> None:
        super().__init__(2, folder, protection)
        # The first starts the command as it is, while the second imports torch, for forks.
        self.interpreters[1].tell({"preload": list(_PRELOADED)})
        self._is_warm = False
        # By the number of ranks, how many processes were each of them in turn, in the run of the user's own command.
        self._turns: dict[int, list[int]] = {}

    def preload(self, names: Sequence[str] = ()) -> None:
        """Does nothing: the command starts new interpreters."""

    def use_forks(self) -> None:
        """Lets further runs be forks of an interpreter that has imported torch."""
        if not self._is_warm:
            self._is_warm = self.interpreters[1].wait(300.0)["ready"]
        self.forks = True

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
        begun, folder = time.monotonic(), self.new_folder()
        words, interpreter = _words(spec.target.command), self.interpreters[forks]
        # Commands do not end of themselves as soon as all ranks have recorded the numbers. Of a repetition, only the
        # records count, but a script may start its ranks several times.
        repeats = bool(spec.interventions) and self._turns.get(spec.world_size) == [1] * spec.world_size
        grace = 0.0 if spec.purpose == "numbers" or repeats else _GRACE
        own = {"RANK": "", **_hash_seed()}
        (code,), hung = self.execute(spec, folder, {interpreter: own}, words, grace, forks=forks)
        run = load_run(spec, folder, [code] * spec.world_size, time.monotonic() - begun, hung=hung)
        if not spec.interventions:
            self._turns[spec.world_size] = [_turns(folder / f"done{rank}") for rank in range(spec.world_size)]
        output = (folder / "output.txt").read_text(errors="replace")
        for record in [*run.ranks, *(run.later.ranks if run.later else [])]:
            record.output = output
        return run


def _hash_seed() -> dict[str, str]:
    """Returns the variables with which each rank orders sets differently, but alike in all runs; see sitecustomize."""
    own = os.environ.get("PYTHONHASHSEED")
    return {"PYTHONHASHSEED": own} if own else {"PYTHONHASHSEED": "1", "DDP_DOCTOR_HASH_SEED": "1"}


def _turns(path: Path) -> int:
    """Returns how many processes have recorded their end in a file."""
    return len(path.read_text().splitlines()) if path.exists() else 0


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
