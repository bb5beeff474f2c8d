"""Runs a command that starts its ranks itself, with probes in each Python that it starts."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_doctor.errors import InputError
from ddp_doctor.files.protection import Protection
from ddp_doctor.files.redirect import SITE
from ddp_doctor.launch.command_ranks import CommandRanks, find_ranks
from ddp_doctor.launch.interpreter import Interpreter
from ddp_doctor.launch.ranks import stop_ranks
from ddp_doctor.probes.spawned import FOUND
from ddp_doctor.records.run import RankRecord, Run, load_record
from ddp_doctor.records.spec import FOLDER, Spec, Target
from ddp_doctor.stop import check_signals

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
        self._ranks: CommandRanks | None = None

    def why_not_alone(self, spec: Spec) -> str:
        """Returns why the number of ranks of the command cannot be changed; empty if it can."""
        return self._number_of_ranks(spec).why_fixed

    def _number_of_ranks(self, spec: Spec) -> CommandRanks:
        if self._ranks is None:
            self._ranks = find_ranks(spec, self._discover)
        return self._ranks

    def _discover(self, spec: Spec) -> int | None:
        folder = self._folder()
        self._run(spec, folder, list(spec.target.command), {})
        found = folder / FOUND
        return int(json.loads(found.read_text())) if found.exists() else None

    def preload(self, names: Sequence[str]) -> None:
        """Does nothing: the command starts new interpreters."""

    def run(self, spec: Spec, environment: dict[str, str] | None = None) -> Run:
        """Runs a specification to its end or timeout."""
        begun, folder, ranks = time.monotonic(), self._folder(), self._number_of_ranks(spec)
        if spec.purpose not in {"train", "numbers"} or (ranks.why_fixed and spec.world_size == 1):
            return Run(spec, folder)
        words, changes = ranks.apply(spec)
        code, hung = self._run(changes, folder, words, environment or {})
        records = [load_record(folder, rank, code) for rank in range(spec.world_size)]
        output = (folder / "output.txt").read_text(errors="replace")
        if any(not record.events for record in records):
            _explain_missing(folder, words)
        stacks = "\n".join(path.read_text() for path in sorted(folder.glob("stack-*.txt")))
        found: list[RankRecord] = [replace(record, output=output, stack=stacks) for record in records]
        return Run(spec, folder, found, hung, time.monotonic() - begun)

    def _folder(self) -> Path:
        self._number += 1
        return Path(tempfile.mkdtemp(prefix=f"run{self._number - 1}-", dir=self.folder))

    def _run(self, spec: Spec, folder: Path, words: list[str], environment: dict[str, str]) -> tuple[int | None, bool]:
        begun = time.monotonic()
        spec.write(folder)
        paths = [str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]
        guarded = self.protection.begin(spec, self._interpreter.make_view)
        own = {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(paths), "RANK": "", **environment}
        request = {**guarded, "folder": str(folder), "environment": own | guarded["environment"], "command": words}
        pid = self._interpreter.begin(request)
        return self._wait(pid, spec, folder, begun + spec.timeout)

    def close(self) -> None:
        """Ends the interpreter."""
        self._interpreter.close()

    def _wait(self, pid: int, spec: Spec, folder: Path, deadline: float) -> tuple[int | None, bool]:
        done_at = None
        while True:
            answer: dict[str, Any] | None = self._interpreter.answer(_POLL_SECONDS)
            if answer is not None:
                return answer["code"], False
            check_signals()
            now = time.monotonic()
            if done_at is None and all((folder / f"done{rank}").exists() for rank in range(spec.world_size)):
                done_at = now
            wait = 0.0 if spec.purpose == "numbers" else _GRACE
            finished = done_at is not None and now >= done_at + wait
            if finished or now > deadline:
                stop_ranks([pid], folder, record=not finished)
                self._interpreter.answer(30.0)
                return None, not finished


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
