"""The user's LightningModule and data, which the ranks make and train with Lightning."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lit_mnist.checkpoint.saved import Saved
from lit_mnist.checkpoint.store import CONFIG
from lit_mnist.cli.claim import Output
from lit_mnist.cli.config_file import read_config_file
from lit_mnist.cli.lightning_cli import ClassParser
from lit_mnist.cli.option_checks import check_objects, check_same_callbacks
from lit_mnist.cli.request import Request
from lit_mnist.cli.resume import find_saved, origin_of, report_resume
from lit_mnist.cli.target import Target
from lit_mnist.cli.validate import check_fault, check_launch, choose_ranks
from lit_mnist.distributed.precision import explain_precision, resolve_precision
from lit_mnist.distributed.rank import print_once
from lit_mnist.errors import InputError
from lit_mnist.experiment.schema import SEED
from lit_mnist.plugins.exact_entry import check_saved
from lit_mnist.plugins.recording.predictions import PREDICTIONS
from lit_mnist.plugins.strategy import SafeDDPStrategy
from lit_mnist.report.run import report_metrics
from lit_mnist.run.folder import result_steps
from lit_mnist.run.imports import import_packages
from lit_mnist.run.job import Job, Parts
from lit_mnist.run.settings import RunSettings
from lit_mnist.run.trainer_settings import TrainerSettings

# Options that the job has in another form.
_IN_JOB = ("devices", "accelerator", "num_nodes", "strategy", "precision")
# Options that decide when a training run ends.
_LENGTH = ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "callbacks")


class UserTarget(Target):
    """The user's classes. See `Target`."""

    def __init__(self, request: Request, engine: str, command_line: str) -> None:
        super().__init__(request, engine, command_line)
        self.run = RunSettings(**request.section("run"))
        # Only what is given: the defaults are those of Lightning.
        self._given = request.section("trainer")
        self._settings = TrainerSettings(**{name: value for name, value in self._given.items() if name != "strategy"})

    def validate(self) -> None:
        """Checks the classes with their arguments, the settings, the devices and the checkpoint."""
        import_packages(self.request.imports)
        self._parser = ClassParser(self.request)
        if self.request.options and self._parser.options_are_known:
            check_objects(self._parser.make_options, self.request.options)
        self.devices, self.world_size = choose_ranks(self._settings)
        check_launch(self.run, self.world_size)
        self.saved = self._find_saved()

    def load(self) -> None:
        """Does nothing: the ranks make the module and its data."""

    def plan(self) -> None:
        """Plans the precision and the threads; the loaders of the ranks decide on the steps."""
        check_fault(self.run, self.world_size)
        # As of a stock Trainer: another precision is the user's choice.
        self._precision = resolve_precision(self._given.get("precision", "32-true"), self.devices.kind)
        if self._given.get("precision") == "auto":
            print_once(f"note: {explain_precision(self.devices.kind)}")
        self.plan_threads(self.devices.count)
        strategy = self._given.get("strategy", "auto")
        trainer = {**self._given, "strategy": strategy, "precision": self._precision, **self._parser.plain_options()}
        defaults = vars(RunSettings())
        of_run = {name: value for name, value in vars(self.run).items() if value != defaults[name]}
        self._config: dict[str, Any] = {
            SEED: self.request.settings.get(SEED, 42),
            **self._parser.plain_classes(),
            "trainer": trainer,
            "run": {name: value for name, value in of_run.items() if name not in {"dir", "resume", "inject"}},
        }
        self._note_seeds()
        if self.saved and self.request.trains:
            self._check_resume(self.saved)
            report_resume(self.saved)

    def _check_resume(self, saved: Saved) -> None:
        """Checks that a resumed run computes the same training, and that something is left to do.

        Raises:
            InputError: A setting or a callback differs, or the training run is complete.
        """
        saved.check_same(self._config)
        options = self._config["trainer"], saved.config.get("trainer", {})
        now, before = (json.loads(json.dumps(each)) for each in options)
        check_same_callbacks(now.get("callbacks"), before.get("callbacks"), saved.path)
        origin, most = origin_of(self.request, saved), self._settings.max_steps
        is_whole = origin is not None and result_steps(origin) == saved.step
        if (is_whole and all(now.get(name) == before.get(name) for name in _LENGTH)) or 0 <= most < saved.step:
            raise InputError(
                f"{saved.path} has completed its {saved.step} steps: there is nothing to resume (raise --epochs or "
                "--max-steps)."
            )

    def _note_seeds(self) -> None:
        """Names the classes with an argument `seed` that another given seed of the run does not change."""
        given = self.request.settings.get(SEED)
        for name in self.request.classes if self.request.trains and given is not None else ():
            seed = self._config[name].get("init_args", {}).get("seed")
            if isinstance(seed, int) and seed != given:
                print_once(f"note: {name}.seed stays {seed}: --{name}.seed {given} changes it")

    def describe(self) -> str:
        """Returns the classes, and the precision."""
        names = [path.rpartition(".")[2] for path in self.request.classes.values()]
        return f"{' with '.join(names)}, {self._precision}"

    def output(self) -> Output:
        """Returns what the run writes into its folder."""
        name = self.folder_name(self.request.classes["model"].rpartition(".")[2])
        every_rank_writes = self.run.trace != "none"
        return Output(name, self._config, predictions=(PREDICTIONS,), every_rank_writes=every_rank_writes)

    def job(self, shared: dict[str, Any]) -> Job:
        """Returns the job."""
        options = {name: value for name, value in self._given.items() if name not in _IN_JOB}
        return Job(
            **shared,
            config=self._config,
            seed=self._config[SEED],
            precision=self._precision,
            make=partial(_make, self._parser.make, options, self._config["trainer"]["strategy"]),
            resumable=True,
            testable=True,
            report=report_metrics,
        )

    def _find_saved(self) -> Saved | None:
        """Returns the checkpoint to resume from, which as many ranks have saved, or to evaluate."""
        if not self.request.trains:
            return find_saved(self.request, partial(Saved.read, hashed=False))
        read = partial(Saved.read, check=lambda checkpoint: check_saved(checkpoint, self.world_size))
        saved = find_saved(self.request, read)
        folder = origin_of(self.request, saved)
        if saved and folder and not saved.section:
            # The checkpoints of release 0.1 do not have the settings.
            return replace(saved, config=read_config_file(folder / CONFIG))
        return saved


def _make(
    make: Callable[[], tuple[LightningModule, LightningDataModule | None, dict[str, Any]]],
    options: dict[str, Any],
    strategy: str,
    job: Job,
) -> Parts:
    """Instantiates the user's classes, and returns the arguments of the Trainer."""
    module, data, made = make()
    options = {**options, **made}
    if job.world_size > 1:
        options["strategy"] = SafeDDPStrategy(
            process_group_backend="nccl" if job.devices.kind == "cuda" else "gloo",
            timeout=timedelta(seconds=job.run.timeout),
            find_unused_parameters=strategy == "ddp_find_unused_parameters_true",
        )
    return Parts(module, data, options, module)
