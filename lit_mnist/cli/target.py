"""What a run trains or evaluates, behind the steps that every run has."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from lit_mnist.checkpoint.store import Found
from lit_mnist.cli.launch import Ranks
from lit_mnist.cli.request import Request
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.distributed.terminal import display_path
from lit_mnist.engines.capabilities import CAPABILITIES
from lit_mnist.run.finish import program
from lit_mnist.run.folder import RunFolder
from lit_mnist.run.folder_lock import FolderLock


class Target(ABC):
    """The project's experiment, or the user's classes. `run` calls each step once, in the order of the methods.

    Args:
        request: The request.
        engine: Name of the engine.
        command_line: The command as it was typed.

    Attributes:
        path: The run folder, once it is claimed.
        total_steps: The optimizer steps of the training run, once it is planned, if they are known.
    """

    path: Path
    total_steps: int | None = None

    def __init__(self, request: Request, engine: str, command_line: str) -> None:
        self.request, self.engine, self.command_line = request, engine, command_line

    @abstractmethod
    def lock(self) -> AbstractContextManager[FolderLock | None]:
        """Locks the folder in which a training run resumes, before its newest checkpoint is chosen."""

    @abstractmethod
    def validate(self) -> None:
        """Checks everything that requires neither data nor a run folder."""

    @abstractmethod
    def load(self) -> None:
        """Loads what the ranks share, before they are forked."""

    @abstractmethod
    def plan(self) -> None:
        """Plans the steps, and checks that they fit the ranks and the checkpoint."""

    @abstractmethod
    def claim(self, lock: FolderLock | None) -> RunFolder | None:
        """Claims the run folder on the process that writes it, the first write of a run, and sets `path`."""

    @abstractmethod
    def ranks(self, folder: RunFolder | None) -> Ranks:
        """Returns the work of the ranks."""

    @abstractmethod
    def find_newest(self, report: Callable[[str], None]) -> Found | None:
        """Returns the newest valid checkpoint of the run folder, and reports each damaged one."""

    @property
    def first_process(self) -> int:
        """ID of the process whose start is the start of the run: torchrun, or this one."""
        return os.getppid() if launched_from_outside() and "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()

    def how_to_resume(self, only_with_checkpoint: bool) -> str:
        """Returns the advice below the message of a run that has failed or was stopped."""
        if not self.request.trains or not CAPABILITIES[self.engine].resume:
            return ""
        damaged: list[str] = []
        found = self.find_newest(damaged.append)
        notes = "".join(f"\n{note}" for note in damaged)
        if found is None:
            none = "\nThere is no checkpoint to resume from: --save-every 30s saves within an epoch."
            return notes if only_with_checkpoint else notes + none
        imports = f" --import {','.join(self.request.imports)}" if self.request.imports else ""
        command, folder = program(self.engine), shlex.quote(display_path(self.path)) + imports
        if self.total_steps is not None and found.step >= self.total_steps:
            return f"{notes}\nThe training was complete: test its weights with: {command} test --ckpt {folder}"
        newest = f"The newest valid checkpoint, after step {found.step}, is {display_path(found.path)}"
        fit = " fit" if self.request.command == "fit" else ""
        return f"{notes}\n{newest}; resume with: {command}{fit} --resume {folder}"
