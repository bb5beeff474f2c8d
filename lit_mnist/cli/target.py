"""What a run trains or evaluates, behind the steps that every run has."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.saved import Saved
from lit_mnist.cli.claim import Output
from lit_mnist.cli.request import Request
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import Rank, launched_from_outside, threads_per_rank, warn_once
from lit_mnist.engines.rank_work import do_job
from lit_mnist.run.imports import import_and_run
from lit_mnist.run.job import Job
from lit_mnist.run.settings import RunSettings


class Target(ABC):
    """The project's experiment, or the user's classes: what differs in the steps of `run`, which calls each once.

    Args:
        request: The request.
        engine: Name of the engine.
        command_line: The command as it was typed.

    Attributes:
        saved: After `validate`, the checkpoint to start from, or None.
        run: After `validate`, the section `run`.
        devices: After `plan`, the devices of this machine.
        world_size: After `plan`, the number of ranks over all machines.
        threads: After `plan`, the threads of each rank.
        total_steps: After `plan`, the optimizer steps of the training run, if they are known.
    """

    saved: Saved | None
    run: RunSettings
    devices: Devices
    world_size: int
    threads: int
    total_steps: int | None = None

    def __init__(self, request: Request, engine: str, command_line: str) -> None:
        self.request, self.engine, self.command_line = request, engine, command_line

    @abstractmethod
    def validate(self) -> None:
        """Checks everything that requires neither data nor a run folder."""

    @abstractmethod
    def describe(self) -> str:
        """Returns what is trained or evaluated, in a few words, after `plan`."""

    @abstractmethod
    def load(self) -> None:
        """Loads what the ranks share, before they are forked."""

    @abstractmethod
    def plan(self) -> None:
        """Plans the run, and checks that it fits the data, the ranks and the checkpoint."""

    @abstractmethod
    def output(self) -> Output:
        """Returns what the run writes into its folder."""

    @abstractmethod
    def job(self, shared: dict[str, Any]) -> Job:
        """Returns the job.

        Args:
            shared: Its arguments that are the same for every target.
        """

    def work(self, folder: Path, checkpoint: Path | None) -> Callable[[Rank], None]:
        """Returns the work of each rank, which a new process begins with the import of the user's packages.

        Args:
            folder: The run folder.
            checkpoint: The checkpoint that the ranks read.
        """
        under_torchrun = launched_from_outside() and "TORCHELASTIC_RUN_ID" in os.environ
        shared = {
            "command": self.request.command,
            "engine": self.engine,
            "run": self.run,
            "devices": self.devices,
            "world_size": self.world_size,
            "threads": self.threads,
            "folder": folder,
            "command_line": self.command_line,
            # The run starts with torchrun, or with this process.
            "first_process": os.getppid() if under_torchrun else os.getpid(),
            "checkpoint": checkpoint,
            "imports": self.request.imports,
        }
        return partial(import_and_run, self.request.imports, partial(do_job, self.job(shared)))

    def plan_threads(self, local_world_size: int) -> None:
        """Sets the threads of each rank, which a resumed training run keeps."""
        if self.saved and self.request.trains:
            self.threads = self.saved.threads(self.run.threads, local_world_size, warn_once)
        else:
            self.threads = threads_per_rank(self.run.threads, local_world_size)

    def folder_name(self, model: str) -> str:
        """Returns the last part of the name of a new run folder."""
        return model if self.request.command == "train" else f"{model}-{self.request.command}"
