"""The project's experiment, by any engine: its settings, data, plan and job."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from lit_mnist.checkpoint.format import LAST
from lit_mnist.checkpoint.store import Found, find_newest_valid
from lit_mnist.checkpoint.weights import read_weights
from lit_mnist.cli.claim import claim, lock_resumed_folder
from lit_mnist.cli.launch import Ranks
from lit_mnist.cli.plan import plan_experiment
from lit_mnist.cli.target import Target
from lit_mnist.cli.validate import validate
from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.rank import launched_from_outside, print_once, threads_per_rank, warn_once
from lit_mnist.engines.capabilities import CAPABILITIES, load_engine
from lit_mnist.engines.rank_work import do_job
from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import NETWORKS
from lit_mnist.models.build import build_net
from lit_mnist.run.folder import RunFolder
from lit_mnist.run.folder_lock import FolderLock
from lit_mnist.run.imports import import_and_run
from lit_mnist.training.job import Job, Splits, split_dataset
from lit_mnist.training.precision import explain_precision, resolve_precision


class ExperimentTarget(Target):
    """The project's experiment. See `Target`."""

    def lock(self) -> AbstractContextManager[FolderLock | None]:
        """Locks the folder in which a training run resumes."""
        return lock_resumed_folder(self.request)

    def validate(self) -> None:
        """Checks the settings, the checkpoint, the engine and the devices."""
        # The ranks are forked from this process and inherit the import.
        load_engine(self.engine)
        self._valid = validate(self.request, self.engine)

    def load(self) -> None:
        """Loads the data and the initial weights, and checks a network of the user."""
        experiment, saved = self._valid.experiment, self._valid.saved
        self._load_samples()
        if experiment.model.net in NETWORKS:
            build_net(experiment.model, num_classes=self._dataset.num_classes, seed=experiment.seed_everything)
        self._weights = None
        if saved is None:
            self._weights = read_weights(experiment.model, num_classes=self._dataset.num_classes, report=print_once)

    def plan(self) -> None:
        """Plans the batches, the steps and the threads."""
        self._plan, self._devices = plan_experiment(self._valid, self._dataset, self._splits)
        self.total_steps = self._plan.total_steps
        setting, saved = self._valid.experiment.run.threads, self._valid.saved
        local = 1 if CAPABILITIES[self.engine].processes == "devices" else self._devices.count
        if saved and self.request.trains:
            # A resumed training run keeps their number.
            self._threads = saved.threads(setting, local, warn_once)
        else:
            self._threads = threads_per_rank(setting, local)

    def claim(self, lock: FolderLock | None) -> RunFolder | None:
        """Claims the run folder."""
        self.path, folder = claim(self._valid, self._plan, lock)
        if self._valid.experiment.trainer.precision == "auto":
            print_once(f"note: {explain_precision(self._devices.kind)}")
        return folder

    def ranks(self, folder: RunFolder | None) -> Ranks:
        """Returns the work of the ranks, which a new process begins with the import of the user's packages."""
        work = partial(import_and_run, self.request.imports, partial(do_job, self._job(folder)))
        return Ranks(work, self._plan.world_size, self._valid.experiment.run, self.path, self.how_to_resume)

    def find_newest(self, report: Callable[[str], None]) -> Found | None:
        """Returns the newest valid checkpoint of the run folder."""
        return find_newest_valid(self.path, report)

    def _job(self, folder: RunFolder | None) -> Job:
        valid, capabilities = self._valid, CAPABILITIES[self.engine]
        return Job(
            command=self.request.command,
            engine=self.engine,
            experiment=valid.experiment,
            dataset=self._dataset,
            splits=self._splits,
            plan=self._plan,
            devices=self._devices,
            precision=resolve_precision(valid.experiment.trainer.precision, self._devices.kind),
            threads=self._threads,
            folder=self.path,
            command_line=self.command_line,
            first_process=self.first_process,
            checkpoint=self._checkpoint(folder),
            weights=self._weights,
            files=self._files,
            extras=valid.make_options,
            stated=valid.stated,
            cuda_graph=valid.cuda_graph,
            resumable=capabilities.resume,
            testable="test" in capabilities.commands,
            imports=self.request.imports,
        )

    def _checkpoint(self, folder: RunFolder | None) -> Path | None:
        """Returns the checkpoint that the ranks read: a copy if it belongs to another run, which may change it."""
        saved = self._valid.saved
        if saved is None:
            return None
        if not self.request.trains or folder is None or launched_from_outside() or saved.is_in(folder.checkpoints):
            return saved.path
        return folder.checkpoints / LAST

    def _load_samples(self) -> None:
        """Loads the data set, its splits, and the user's images, which replace the test split."""
        request, experiment, saved = self.request, self._valid.experiment, self._valid.saved
        fetch = saved is None or saved.may_fetch(request.settings, experiment.data, trains=request.trains)
        self._files: tuple[Path, ...] = ()
        if not request.images:
            self._dataset = load_dataset(experiment.data, fetch=fetch)
            self._splits = split_dataset(experiment, self._dataset, request.command)
            return
        if experiment.trainer.limit_of("predict") is not None:
            raise InputError("trainer.limit_predict_batches applies to the test split: pass fewer --images instead.")
        # Imported here because only this command needs it.
        from lit_mnist.predict import get_prediction_module
        from lit_mnist.predict.user_images import find_images

        self._files = tuple(find_images([Path(image) for image in request.images]))
        predict = get_prediction_module(experiment.data.task)
        self._dataset = predict.load_user_images(self._files, experiment.data, fetch=fetch)
        self._splits = Splits(self._dataset.train, self._dataset.train, self._dataset.test)
