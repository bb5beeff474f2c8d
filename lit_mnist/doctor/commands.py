"""Runs a command that starts its ranks itself, with probes in each Python that it starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lit_mnist.doctor.files.protection import Protection
from lit_mnist.doctor.files.redirect import SITE
from lit_mnist.doctor.interpreter import Interpreter
from lit_mnist.doctor.records import RankRecord, Run, load_record
from lit_mnist.doctor.runs import check_signal, stop_ranks
from lit_mnist.doctor.spec import FOLDER, Spec, Target
from lit_mnist.errors import InputError

_NUMBER = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(\w+))?")
_POLL_SECONDS = 0.05
# Seconds that a command may still need after all ranks have recorded their end.
_GRACE = 10.0


class CommandRuns:
    """Runs commands.

    Args:
        folder: Temporary folder of the examination.
        target: The command.
        protection: Keeps the runs from the user's files.

    Raises:
        InputError: There is no such command.
    """

    def __init__(self, folder: Path, target: Target, protection: Protection) -> None:
        self.folder, self.protection = folder, protection
        if shutil.which(target.command[0]) is None:
            raise InputError(f"There is no command {target.command[0]}.")
        self._number = 0
        self._interpreter = Interpreter(0, folder)

    def can_run_alone(self, target: Target) -> bool:
        """Returns whether the command names its number of ranks, which can be changed."""
        return bool(with_ranks(target.command, 1))

    def preload(self, names: Sequence[str]) -> None:
        """Does nothing: the command starts new interpreters."""

    def run(self, spec: Spec, environment: dict[str, str] | None = None) -> Run:
        """Runs a specification to its end or timeout."""
        begun = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix=f"run{self._number}-", dir=self.folder))
        self._number += 1
        words = with_ranks(spec.target.command, spec.world_size)
        if spec.purpose not in {"train", "numbers"} or not (words or spec.world_size > 1):
            return Run(spec, folder)
        spec.write(folder)
        paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths), "RANK": "", **(environment or {})}
        guarded = self.protection.begin(spec, self._interpreter.make_view)
        own |= guarded["environment"]
        request = {**guarded, "folder": str(folder), "environment": own, "command": words or list(spec.target.command)}
        pid = self._interpreter.begin(request)
        code, hung = self._wait(pid, spec, folder, begun + spec.timeout)
        records = [load_record(folder, rank, code) for rank in range(spec.world_size)]
        output = (folder / "output.txt").read_text(errors="replace")
        stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stack-*.txt")))
        found: list[RankRecord] = [replace(record, output=output, stack=stacks) for record in records]
        return Run(spec, folder, found, hung, time.monotonic() - begun)

    def close(self) -> None:
        """Ends the interpreter."""
        self._interpreter.close()

    def _wait(self, pid: int, spec: Spec, folder: Path, deadline: float) -> tuple[int | None, bool]:
        done_at = None
        while True:
            answer: dict[str, Any] | None = self._interpreter.answer(_POLL_SECONDS)
            if answer is not None:
                return answer["code"], False
            check_signal()
            now = time.monotonic()
            if done_at is None and all((folder / f"done{rank}").exists() for rank in range(spec.world_size)):
                done_at = now
            wait = 0.0 if spec.purpose == "numbers" else _GRACE
            finished = done_at is not None and now >= done_at + wait
            if finished or now > deadline:
                stop_ranks([pid], folder, record=not finished)
                self._interpreter.answer(30.0)
                return None, not finished


def with_ranks(command: Sequence[str], world_size: int) -> list[str]:
    """Returns a command of a launcher with another number of ranks; empty if it names none."""
    words = list(command)
    for place, word in enumerate(words):
        if word.endswith(".py"):
            break
        if found := _NUMBER.fullmatch(word):
            if found[1] is not None:
                words[place] = word.replace(f"={found[1]}", f"={world_size}")
            elif place + 1 < len(words):
                words[place + 1] = str(world_size)
            return [_own_python(words[0]), *words[1:]]
    return []


def _own_python(word: str) -> str:
    return sys.executable if word in {"python", "python3"} else word
