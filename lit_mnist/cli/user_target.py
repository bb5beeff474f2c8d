"""The user's LightningModule and data, which the ranks make and train with Lightning."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from lit_mnist.checkpoint.store import CONFIG, Found
from lit_mnist.cli.claim import writes_run_folder
from lit_mnist.cli.launch import Ranks
from lit_mnist.cli.lightning_cli import ClassParser
from lit_mnist.cli.own_resume import check_same, find_checkpoint, find_folder, find_newest, lock_resumed
from lit_mnist.cli.request import Request
from lit_mnist.cli.target import Target
from lit_mnist.cli.validate import check_fault, check_launch, choose_ranks
from lit_mnist.distributed.debugger import wait_for_debugger
from lit_mnist.distributed.rank import Rank, print_once, threads_per_rank
from lit_mnist.distributed.rank_status import RANK_STATUS
from lit_mnist.engines.own_callbacks import PREDICTIONS
from lit_mnist.engines.own_job import OwnJob
from lit_mnist.engines.own_module import run
from lit_mnist.engines.rank_work import prepare_process
from lit_mnist.errors import InputError
from lit_mnist.experiment import RunSettings, TrainerSettings
from lit_mnist.experiment.schema import SEED
from lit_mnist.profiling.faults import fault_marker
from lit_mnist.run.folder import METRICS, REPORT, RESULT, RunFolder, default_path
from lit_mnist.run.folder_lock import FolderLock
from lit_mnist.run.imports import import_packages
from lit_mnist.run.metrics_log import read_metrics
from lit_mnist.training.precision import explain_precision, resolve_precision

_WRITES = {"predict": (PREDICTIONS,), "validate": (CONFIG, RESULT, REPORT), "test": (CONFIG, RESULT, REPORT)}
# Options that the job has in another form.
_IN_JOB = ("devices", "accelerator", "num_nodes", "strategy", "precision")


class UserTarget(Target):
    """The user's classes. See `Target`."""

    def __init__(self, request: Request, engine: str, command_line: str) -> None:
        super().__init__(request, engine, command_line)
        self._run = RunSettings(**request.section("run"))
        # Only what is given: the defaults are those of Lightning.
        self._trainer = request.section("trainer")
        self._settings = TrainerSettings(**{name: value for name, value in self._trainer.items() if name != "strategy"})

    def lock(self) -> AbstractContextManager[FolderLock | None]:
        """Locks the folder in which a training run resumes."""
        self._folder, self._origin = find_folder(self.request, self._run)
        return lock_resumed(self.request, self._run, self._folder, self._origin)

    def validate(self) -> None:
        """Checks the classes with their arguments, the settings, the checkpoint and the devices."""
        import_packages(self.request.imports)
        self._parser = ClassParser(self.request)
        self._devices, self._world_size = choose_ranks(self._settings)
        check_launch(self._run, self._world_size)
        self._checkpoint = find_checkpoint(self.request, self._run, self._origin, self._world_size)

    def load(self) -> None:
        """Does nothing: the ranks make the module and its data."""

    def plan(self) -> None:
        """Plans the threads and the precision; the loaders of the ranks decide on the steps."""
        check_fault(self._run, self._world_size)
        self._threads = threads_per_rank(self._run.threads, self._devices.count)
        # As of a stock Trainer: another precision is the user's choice.
        self._precision = resolve_precision(self._trainer.get("precision", "32-true"), self._devices.kind)
        if self._trainer.get("precision") == "auto":
            print_once(f"note: {explain_precision(self._devices.kind)}")
        defaults = vars(RunSettings())
        of_run = {name: value for name, value in vars(self._run).items() if value != defaults[name]}
        self._config = {
            SEED: self.request.settings.get(SEED, 42),
            **self._parser.plain_classes(),
            "trainer": {
                **self._trainer,
                "strategy": self._trainer.get("strategy", "auto"),
                "precision": self._precision,
                **self._parser.plain_options(),
            },
            # The number of threads changes the rounding, and a resumed run needs the same.
            "run": {
                **{name: value for name, value in of_run.items() if name not in {"dir", "resume", "inject"}},
                "threads": self._threads,
            },
        }
        if self._checkpoint and self.request.trains:
            check_same(self._checkpoint, self._config)

    def claim(self, lock: FolderLock | None) -> RunFolder | None:
        """Claims the run folder, and writes its configuration."""
        name = self.request.classes["model"].rpartition(".")[2]
        name = name if self.request.command == "train" else f"{name}-{self.request.command}"
        self.path = self._folder or default_path(name).absolute()
        if not writes_run_folder():
            return None
        in_place = self._folder is not None and self._origin == self._folder
        if in_place:
            read_metrics(self.path)
        folder = RunFolder.claim(
            self._folder,
            name=name,
            writes=_WRITES.get(self.request.command, (CONFIG, RESULT, METRICS, REPORT, "checkpoints")),
            folders=("checkpoints", "tensorboard") if self.request.trains else (),
            resumed=in_place,
            lock=lock,
        )
        self.path = folder.path
        try:
            if self.request.trains and not in_place:
                fault_marker(folder.path).unlink(missing_ok=True)
            if self.request.command != "predict":
                folder.write_config(self._config)
        except OSError as error:
            folder.undo()
            raise InputError(f"The run folder {folder.path} cannot be written: {error.strerror}.") from error
        return folder

    def ranks(self, folder: RunFolder | None) -> Ranks:
        """Returns the work of the ranks."""
        return Ranks(partial(_work, self._job()), self._world_size, self._run, self.path, self.how_to_resume)

    def find_newest(self, report: Callable[[str], None]) -> Found | None:
        """Returns the newest valid checkpoint of the run folder."""
        return find_newest(self.path, report)

    def _job(self) -> OwnJob:
        config: dict[str, Any] = self._config
        return OwnJob(
            command=self.request.command,
            make=self._parser.make,
            config=config,
            run=self._run,
            seed=config[SEED],
            trainer={name: value for name, value in self._trainer.items() if name not in _IN_JOB},
            strategy=config["trainer"]["strategy"],
            precision=self._precision,
            devices=self._devices,
            world_size=self._world_size,
            threads=self._threads,
            folder=self.path,
            command_line=self.command_line,
            first_process=self.first_process,
            checkpoint=self._checkpoint,
        )


def _work(job: OwnJob, rank: Rank) -> None:
    """Runs the job in one rank; after a restart, from the newest checkpoint."""
    prepare_process(job.threads, deterministic=bool(job.trainer.get("deterministic")))
    wait_for_debugger(rank, job.run.timeout)
    if job.trains and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        found = find_newest(job.folder, RANK_STATUS.warn if rank.is_first else lambda _: None)
        job = replace(job, checkpoint=found.path if found else job.checkpoint)
    run(job, rank)
