"""Runs a command that starts its ranks itself, with probes in each Python that it starts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ddp_doctor.errors import InputError
from ddp_doctor.files.protection import Protection
from ddp_doctor.launch.command_rank import FOUND
from ddp_doctor.launch.runner import Ended, Runner
from ddp_doctor.records.run import Run, load_record
from ddp_doctor.records.spec import Spec

# Seconds that a command may still need after all ranks have recorded their end.
_GRACE = 10.0


class CommandRunner(Runner):
    """Runs commands.

    Args:
        folder: Temporary folder of the examination.
        protection: Keeps the runs from the user's files.
    """

    def __init__(self, folder: Path, protection: Protection) -> None:
        super().__init__(1, folder, protection)
        self._ranks: CommandRanks | None = None

    def why_not_alone(self, spec: Spec) -> str:
        """Returns why the number of ranks of the command cannot be changed; empty if it can."""
        return self._number_of_ranks(spec).why_fixed

    def preload(self, names: Sequence[str] = ()) -> None:
        """Does nothing: the command starts new interpreters."""

    def run(self, spec: Spec, environment: dict[str, str] | None = None) -> Run:
        """Runs a specification to its end or timeout.

        Raises:
            InputError: The command does not exist, or its interpreter lacks a package.
        """
        begun, folder, ranks = time.monotonic(), self.new_folder(), self._number_of_ranks(spec)
        if spec.purpose not in {"train", "numbers"} or (ranks.why_fixed and spec.world_size == 1):
            return Run(spec, folder)
        words, changed = ranks.apply(spec)
        (code,), hung = self._command(changed, folder, words, environment or {})
        records = [load_record(folder, rank, code) for rank in range(spec.world_size)]
        if any(not record.events for record in records):
            _explain_missing(folder, words)
        output = (folder / "output.txt").read_text(errors="replace")
        stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stack-*.txt")))
        for record in records:
            record.output, record.stack = output, stacks
        return Run(spec, folder, records, hung, time.monotonic() - begun)

    def _number_of_ranks(self, spec: Spec) -> CommandRanks:
        if self._ranks is None:
            if shutil.which(spec.target.command[0]) is None:
                raise InputError(f"There is no command {spec.target.command[0]}.")
            self._ranks = find_ranks(spec, self._discover)
        return self._ranks

    def _discover(self, spec: Spec) -> int | None:
        folder = self.new_folder()
        self._command(spec, folder, spec.target.command, {})
        found = folder / FOUND
        return int(json.loads(found.read_text())) if found.exists() else None

    def _command(self, spec: Spec, folder: Path, words: Sequence[str], environment: dict[str, str]) -> Ended:
        grace = 0.0 if spec.purpose == "numbers" else _GRACE
        return self.execute(spec, folder, [{"RANK": "", **environment}], words, grace)


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


_NUMBER = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(\w+))?")


@dataclass(frozen=True)
class CommandRanks:
    """How to run a command on another number of ranks.

    Attributes:
        place: Place of the word that is the number, or ends with it after `=`; None if no word is.
        devices: Whether the number is that of the GPUs.
        why_fixed: Why it cannot be changed; empty if it can.
    """

    place: int | None = None
    devices: bool = False
    why_fixed: str = ""

    def apply(self, spec: Spec) -> tuple[list[str], Spec]:
        """Returns the words of the command, and the specification, for this number of ranks."""
        words = with_ranks(spec.target.command, spec.world_size) or list(spec.target.command)
        if self.place is not None:
            words = _with_number(words, self.place, spec.world_size)
        changes = {"devices": spec.world_size} if self.devices else {}
        return words, replace(spec, interventions={**spec.interventions, **changes})


def find_ranks(spec: Spec, discover: Callable[[Spec], int | None]) -> CommandRanks:
    """Finds out what determines the number of ranks of a command.

    Args:
        spec: The run.
        discover: Runs a specification until it starts processes by torch.multiprocessing, and returns their number;
            None if it starts none.
    """
    command = spec.target.command
    if with_ranks(command, 1):
        return CommandRanks()

    def processes(words: Sequence[str], devices: int = 0) -> int | None:
        target = replace(spec.target, command=tuple(words))
        return discover(replace(spec, target=target, purpose="discover", interventions={"devices": devices}))

    number = processes(command)
    if number is None:
        why = "the command has no flag for the number of ranks, and does not start them by torch.multiprocessing"
        return CommandRanks(why_fixed=why)
    other = number + 1 if number else 3
    if processes(command, other) == other:
        return CommandRanks(devices=True)
    script = next((place for place, word in enumerate(command) if word.endswith(".py")), 0)
    for place, word in enumerate(command):
        # An argument of the program that is this number.
        is_number = place > script and word.rpartition("=")[2] == str(number)
        if is_number and processes(_with_number(command, place, other)) == other:
            return CommandRanks(place)
    how = "the number of GPUs and the arguments of the program"
    return CommandRanks(why_fixed=f"the program starts {number} processes by torch.multiprocessing, whatever {how} are")


def with_ranks(command: Sequence[str], world_size: int) -> list[str]:
    """Returns a command of a launcher with another number of ranks; empty if it names none."""
    words = list(command)
    for place, word in enumerate(words):
        if word.endswith(".py"):
            break
        if found := _NUMBER.fullmatch(word):
            if found[1] is not None or place + 1 < len(words):
                words = _with_number(words, place + (found[1] is None), world_size)
            return [sys.executable if words[0] in {"python", "python3"} else words[0], *words[1:]]
    return []


def _with_number(command: Sequence[str], place: int, number: int) -> list[str]:
    name, equals, _ = command[place].rpartition("=")
    return [*command[:place], f"{name}{equals}{number}", *command[place + 1 :]]
