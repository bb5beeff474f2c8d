"""What determines the number of ranks of a command: a launcher's flag, an argument, or the number of GPUs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ddp_doctor.records.spec import Spec

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
