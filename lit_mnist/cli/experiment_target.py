"""The project's experiment, by any engine: its settings, data, plan and job."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lit_mnist.cli.claim import Output
from lit_mnist.cli.experiment_checks import (
    check_lightning_limits,
    check_split_sizes,
    check_steps,
)
from lit_mnist.cli.resume import find_saved, report_resume, resumes_in_place
from lit_mnist.cli.target import Target
from lit_mnist.cli.torch_internals import import_compiler
from lit_mnist.cli.validate import check_launch, choose_ranks
from lit_mnist.data.dataset import Dataset, load_dataset
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.precision import explain_precision, resolve_precision
from lit_mnist.distributed.rank import launched_from_outside, print_once
from lit_mnist.engines.capabilities import CAPABILITIES, load_engine
from lit_mnist.engines.device_checks import check_devices, uses_cuda_graph
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.learning_rate import explain_peak
from lit_mnist.experiment.plan import Plan
from lit_mnist.experiment.registry import NETWORKS
from lit_mnist.models.build import build_net
from lit_mnist.predict import digits, write_predictions
from lit_mnist.report.run import report_experiment
from lit_mnist.run.folder import RESULT
from lit_mnist.run.job import Parts
from lit_mnist.training.evaluation import VALIDATION_METRICS
from lit_mnist.training.job import ExperimentJob, Splits, plan_for, split_dataset
from lit_mnist.training.resume import SavedExperiment
from lit_mnist.training.weights import read_weights


class ExperimentTarget(Target):
    """The project's experiment. See `Target`."""

    saved: SavedExperiment | None

    def validate(self) -> None:
        """Checks the settings, the checkpoint, the engine and the devices."""
        request = self.request
        self.saved = find_saved(request, partial(SavedExperiment.read, hashed=request.trains))
        self._experiment = experiment = self._make_experiment()
        self.run = experiment.run
        self._parse_options()
        if self.saved and request.trains:
            if not CAPABILITIES[self.engine].resume:
                raise InputError(
                    f"The engine {self.engine} cannot resume from {self.saved.path}: choose another --run-dir."
                )
            self.saved.check_same(experiment.to_dict())
        self.devices, self.world_size = choose_ranks(experiment.trainer)
        check_devices(self.engine, experiment, self.devices, self.world_size)
        self._cuda_graph = request.trains and uses_cuda_graph(
            self.engine, experiment, self.devices, self.world_size, request.options
        )
        check_launch(self.run, self.world_size)

    def load(self) -> None:
        """Loads the data and the initial weights, and checks a network of the user."""
        model = self._experiment.model
        with ThreadPoolExecutor(1) as pool:
            # MNIST's files are decoded beside the imports. Only functions of this project leave the main thread.
            reads_files = self._experiment.data.name == "mnist" and not self.request.images
            loading = pool.submit(load_dataset, self._experiment.data) if reads_files else None
            # The ranks are forked from this process and inherit the imports.
            load_engine(self.engine)
            if self.request.trains and self.run.launcher != "spawn":
                import_compiler()
        self._load_samples(loading.result() if loading else None)
        if model.net in NETWORKS:
            build_net(model, num_classes=self._dataset.num_classes, seed=self._experiment.seed_everything)
        self._weights = None
        if self.saved is None:
            self._weights = read_weights(model, num_classes=self._dataset.num_classes, report=print_once)

    def plan(self) -> None:
        """Plans the batches, the steps and the threads."""
        request, experiment = self.request, self._experiment
        if experiment.trainer.devices == "auto" and request.command == "predict" and not launched_from_outside():
            self.devices = Devices(self.devices.kind, self.devices.numbers[: len(self._splits.test)])
            self.world_size = self.devices.count
        check_split_sizes(request, self._splits, self.world_size)
        plan = Plan.without_training(self.world_size, experiment.model.lr)
        if request.trains:
            plan = plan_for(experiment, self._splits, self.world_size)
        on_devices = CAPABILITIES[self.engine].processes == "devices"
        # A single process gets the whole batch; `batch_per: rank` has already counted the devices.
        self._plan = plan = replace(plan, world_size=1) if on_devices else plan
        check_steps(self.run, plan)
        if request.trains:
            check_lightning_limits(self._stated, plan)
        self._check_saved()
        if request.trains and (reason := explain_peak(experiment.model, self.world_size, plan.total_steps)):
            print_once(f"note: {reason}")
        if plan.dropped:
            noun, do, be = ("samples", "do", "are") if plan.dropped > 1 else ("sample", "does", "is")
            print_once(
                f"note: {plan.dropped} {noun} of each epoch {do} not fill a batch of {plan.batch_size} and {be} dropped"
            )
        if experiment.trainer.precision == "auto":
            print_once(f"note: {explain_precision(self.devices.kind)}")
        self.world_size, self.total_steps = plan.world_size, plan.total_steps
        self.plan_threads(1 if on_devices else self.devices.count)

    def describe(self) -> str:
        """Returns the network, the data, and the precision."""
        precision = resolve_precision(self._experiment.trainer.precision, self.devices.kind)
        return f"{self._experiment.model.net} on {self._dataset.name}, {precision}"

    def output(self) -> Output:
        """Returns what the run writes into its folder."""
        experiment, command = self._experiment, self.request.command
        config = experiment.replace("run", dir=None, resume=None, inject=None).to_dict()
        config["trainer"].update(self._stated)
        return Output(
            name=self.folder_name(experiment.model.net),
            config=config,
            predictions=(digits.TABLE, digits.GRID),
            complete=command == "train" and self.saved is not None and self.saved.step == self.total_steps,
            every_rank_writes=self.run.trace != "none",
        )

    def job(self, shared: dict[str, Any]) -> ExperimentJob:
        """Returns the job."""
        experiment, capabilities = self._experiment, CAPABILITIES[self.engine]
        config = experiment.to_dict()
        config["trainer"].update(self._stated)
        return ExperimentJob(
            **shared,
            config=config,
            seed=experiment.seed_everything,
            precision=resolve_precision(experiment.trainer.precision, self.devices.kind),
            make=_make_classifier if self.engine == "lightning" else None,
            resumable=capabilities.resume,
            testable="test" in capabilities.commands,
            columns=("train_loss", "train_accuracy", "lr", "images_per_s", *VALIDATION_METRICS),
            report=report_experiment,
            predictions=write_predictions,
            experiment=experiment,
            dataset=self._dataset,
            splits=self._splits,
            plan=self._plan,
            weights=self._weights,
            files=self._files,
            options=self._make_options,
            cuda_graph=self._cuda_graph,
        )

    def _make_experiment(self) -> Experiment:
        """Returns the experiment of the request; the checkpoint provides the defaults."""
        if self.saved is None:
            return self.request.experiment()
        if not self.request.trains:
            return self.request.experiment(self.saved.to_evaluate())
        experiment = self.request.experiment(self.saved.to_resume())
        if experiment.trainer.precision == "auto":
            # The file may say `auto`: a resumed training run keeps the precision that it began with, on any machine.
            experiment = experiment.replace("trainer", precision=self.saved.section["precision"])
        return experiment

    def _parse_options(self) -> None:
        """Parses and checks the further options of Lightning's Trainer; without any, Lightning is not imported."""
        self._stated: dict[str, Any] = {}
        self._make_options: Callable[[], dict[str, Any]] | None = None
        if self.request.options:
            from lit_mnist.cli.lightning_cli import ClassParser
            from lit_mnist.cli.option_checks import check_objects

            parser = ClassParser(self.request)
            self._stated, self._make_options = parser.plain_options(), parser.make_options
            check_objects(parser.make_options, self.request.options, self._experiment.data)

    def _load_samples(self, dataset: Dataset | None) -> None:
        """Loads the data set, its splits, and the user's images, which replace the test split.

        Args:
            dataset: The data set, if it has been loaded.
        """
        request, experiment, saved = self.request, self._experiment, self.saved
        fetch = saved is None or saved.may_fetch(request.settings, experiment.data, trains=request.trains)
        self._files: tuple[Path, ...] = ()
        if not request.images:
            self._dataset = dataset or load_dataset(experiment.data, fetch=fetch)
            self._splits = split_dataset(experiment, self._dataset, request.command)
            return
        if experiment.trainer.limit_of("predict") is not None:
            raise InputError("trainer.limit_predict_batches applies to the test split: pass fewer --images instead.")
        # Imported here because only this command needs it.
        from lit_mnist.predict.user_images import find_images

        self._files = tuple(find_images([Path(image) for image in request.images]))
        self._dataset = digits.load_user_images(self._files, experiment.data, fetch=fetch)
        self._splits = Splits(self._dataset.train, self._dataset.train, self._dataset.test)

    def _check_saved(self) -> None:
        """Checks that the checkpoint fits the data and the plan."""
        request, saved = self.request, self.saved
        if saved and request.trains:
            # The run may have been interrupted while it tested its weights.
            may_be_done = resumes_in_place(request) and not (Path(str(request.run_dir)) / RESULT).exists()
            saved.check_resume(self._experiment, self._dataset, self._plan, may_be_done=may_be_done)
            report_resume(saved)
        elif saved:
            saved.check_evaluation(self._experiment, self._dataset, validates=request.command == "validate")


def _make_classifier(job: ExperimentJob) -> Parts:
    # Only the engine lightning imports Lightning.
    from lit_mnist.engines.classifier import make_classifier

    return make_classifier(job)
