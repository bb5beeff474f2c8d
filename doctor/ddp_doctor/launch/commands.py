"""Runs a command that starts its ranks itself, with probes in each Python that it starts."""

from __future__ import annotations

import json
import os
import shlex
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
            InputError: The command does not exist, or its interpreter lacks a package.
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
        if run.lost:
            _explain_missing(folder, words)
        output = (folder / "output.txt").read_text(errors="replace")
        stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stack-*.txt")))
        for record in [*run.ranks, *(run.later.ranks if run.later else [])]:
            record.output, record.stack = output, stacks
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


def _explain_missing(folder: Path, words: Sequence[str]) -> None:
    """Raises an InputError if the command failed for want of a package that the doctor needs in its Python."""
    for path in sorted(folder.glob("missing-*.json")):
        python, name = json.loads(path.read_text())
        own = shlex.join([sys.executable, *words[1:]]) if Path(words[0]).name.startswith("python") else ""
        fix = f"name that of the doctor: -- {own}" if own else "activate the environment that has both"
        raise InputError(
            f"The command runs the interpreter {python}, which has no package {name}, but the doctor runs in "
            f"{sys.executable}. Start the command with an interpreter that has torch and ddp_doctor, or {fix}"
        )
