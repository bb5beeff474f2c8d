"""The project's experiment, by any engine: its settings, data, plan and job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from lit_mnist.cli.claim import Output
from lit_mnist.cli.plan import plan_experiment
from lit_mnist.cli.target import Target
from lit_mnist.cli.validate import validate
from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.rank import Rank, print_once
from lit_mnist.engines.capabilities import CAPABILITIES, load_engine
from lit_mnist.engines.rank_work import do_job
from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import NETWORKS
from lit_mnist.models.build import build_net
from lit_mnist.predict import digits, segmentation
from lit_mnist.run.imports import import_and_run
from lit_mnist.training.job import Job, Splits, split_dataset
from lit_mnist.training.precision import explain_precision, resolve_precision
from lit_mnist.training.weights import read_weights


class ExperimentTarget(Target):
    """The project's experiment. See `Target`."""

    def validate(self) -> None:
        """Checks the settings, the checkpoint, the engine and the devices."""
        # The ranks are forked from this process and inherit the import.
        load_engine(self.engine)
        self._valid = validate(self.request, self.engine)
        self.saved, self.run = self._valid.saved, self._valid.experiment.run

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
        self.world_size, self.total_steps = self._plan.world_size, self._plan.total_steps
        if self._valid.experiment.trainer.precision == "auto":
            print_once(f"note: {explain_precision(self._devices.kind)}")
        self.plan_threads(1 if CAPABILITIES[self.engine].processes == "devices" else self._devices.count)

    def output(self) -> Output:
        """Returns what the run writes into its folder."""
        experiment, command, saved = self._valid.experiment, self.request.command, self._valid.saved
        config = experiment.replace("run", dir=None, resume=None, inject=None).to_dict()
        config["trainer"].update(self._valid.stated)
        return Output(
            name=self.folder_name(experiment.model.net),
            config=config,
            predictions=(digits.TABLE, digits.GRID, segmentation.MASKS, segmentation.OVERLAYS),
            complete=command == "train" and saved is not None and saved.step == self.total_steps,
            every_rank_writes=self.run.trace != "none" or (command == "predict" and experiment.data.task.pixelwise),
        )

    def work(self, folder: Path, checkpoint: Path | None) -> Callable[[Rank], None]:
        """Returns the work of each rank, which a new process begins with the import of the user's packages."""
        return partial(import_and_run, self.request.imports, partial(do_job, self._job(folder, checkpoint)))

    def _job(self, folder: Path, checkpoint: Path | None) -> Job:
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
            threads=self.threads,
            folder=folder,
            command_line=self.command_line,
            first_process=self.first_process,
            checkpoint=checkpoint,
            weights=self._weights,
            files=self._files,
            extras=valid.make_options,
            stated=valid.stated,
            cuda_graph=valid.cuda_graph,
            resumable=capabilities.resume,
            testable="test" in capabilities.commands,
            imports=self.request.imports,
        )

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
