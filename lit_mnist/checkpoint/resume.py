"""A verified checkpoint with its experiment, and the rules for resuming and evaluating it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.format import SECTION, read_checkpoint
from lit_mnist.checkpoint.saved_experiment import read_experiment, read_trainer_experiment
from lit_mnist.checkpoint.state import MANAGER_STATE
from lit_mnist.checkpoint.store import CONFIG, find_run_folder
from lit_mnist.data.dataset import Dataset
from lit_mnist.distributed.rank import count_cores, launched_from_outside, print_once, threads_per_rank
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment, flatten
from lit_mnist.experiment.plan import Plan

# The settings that a resumed run may change, since they do not change what it computes.
_MAY_CHANGE = {
    "model.compile",
    "model.weights",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.max_epochs",
    "trainer.max_steps",
    "data.root",
    "data.download",
    "data.eval_batch_size",
    "data.workers",
}


@dataclass(frozen=True)
class Saved:
    """A verified checkpoint with its experiment.

    Attributes:
        path: The file.
        section: The `lit_mnist` section of the file.
        experiment: The experiment as nested plain values.
        step: Optimizer steps so far.
        best: The best validation score so far; negative if there is none.
    """

    path: Path
    section: dict[str, Any]
    experiment: dict[str, Any]
    step: int
    best: float

    @classmethod
    def read(cls, path: Path, *, hashed: bool = True) -> Saved:
        """Reads and verifies a checkpoint.

        Args:
            path: The file.
            hashed: Whether a SHA-256 is required. A checkpoint of a stock `Trainer.save_checkpoint` has none, and has
                only the model and the seed of the experiment.

        Raises:
            InputError: The file is damaged, or not a checkpoint of this project and version.
        """
        checkpoint = read_checkpoint(path, hashed=hashed)
        if SECTION not in checkpoint:
            num_classes, experiment = read_trainer_experiment(path, checkpoint)
            print_once(
                f"note: {display_path(path.absolute())} was written by Trainer.save_checkpoint: it has no SHA-256, was "
                "not verified, and does not name the data that it was trained on"
            )
            return cls(path, {"num_classes": num_classes}, experiment, checkpoint["global_step"], best=-1.0)
        experiment = read_experiment(path, checkpoint)
        kept = checkpoint["callbacks"].get(MANAGER_STATE)
        best = kept.get("best") if isinstance(kept, dict) else None
        best = best if isinstance(best, float) else -1.0
        return cls(path, checkpoint[SECTION], experiment, checkpoint["global_step"], best)

    def is_in(self, folder: Path) -> bool:
        """Returns whether the file is in a folder."""
        return self.path.resolve().parent == folder.resolve()

    def to_resume(self) -> dict[str, Any]:
        """Returns the default settings of a resumed run, with the data folder but without `data.download`."""
        # The machine may differ, but not the precision.
        trainer = {**self.experiment["trainer"], "precision": self.section["precision"]}
        if launched_from_outside():
            trainer["devices"] = "auto"
        data, run = {**self.experiment["data"], "download": False}, {"threads": self.experiment["run"]["threads"]}
        return {**self.experiment, "data": data, "trainer": trainer, "run": run}

    def to_evaluate(self) -> dict[str, Any]:
        """Returns the default settings of an evaluation, without those for devices and the data folder."""
        is_double = self.experiment["trainer"]["precision"] == "64-true"
        trainer = {"precision": "64-true" if is_double else "auto"}
        model = {**self.experiment["model"], "compile": False}
        data = self.experiment.get("data", {})
        data = {key: value for key, value in data.items() if key != "root"}
        return {**self.experiment, "model": model, "data": data, "trainer": trainer, "run": {}}

    def may_fetch(self, given: Mapping[str, Any], data: DataSettings, *, trains: bool) -> bool:
        """Returns whether missing data may be downloaded, which the user and not the checkpoint decides.

        Args:
            given: The settings of the command line and its configuration files, by dotted keys.
            data: The resulting settings.
            trains: Whether the run resumes a training, whose data folder may come from the checkpoint.
        """
        if data.name == "mnist":  # Part of the package.
            return True
        if trains:
            return data.root is None or given.get("data.root") is not None
        return given.get("data.name") == data.name

    def threads(self, setting: int | None, ranks: int, report: Callable[[str], None]) -> int:
        """Returns the number of threads per rank of a resumed training: by default the same as before.

        Args:
            setting: `run.threads` of the command line or of the first start, or None.
            ranks: Number of ranks of this machine.
            report: Receives a message if the number differs from before, or from the default of this machine.
        """
        used, before = int(self.section["threads"]), self.section.get("local_world_size")
        before = before if isinstance(before, int) else None
        if setting is None and before == ranks:
            default = threads_per_rank(None, ranks)
            if default != used:
                report(
                    f"each rank uses {used} thread{'s' * (used != 1)}, as before; the default for {count_cores()} "
                    f"cores is {default}. --run.threads sets another number, but the result is then not bit-identical."
                )
            return used
        chosen = threads_per_rank(setting, ranks)
        if chosen != used:
            why = f"there were {before or 'another number of'} ranks per machine before, and here are {ranks}"
            why = f"run.threads is {setting}" if setting else why
            report(
                f"each rank uses {chosen} thread{'s' * (chosen != 1)}, but {used} before ({why}): the result is not "
                "bit-identical to that of an uninterrupted run."
            )
        return chosen

    def check_best(self, path: Path) -> None:
        """Checks that a file is the best checkpoint of this training up to this checkpoint.

        Raises:
            InputError: The file is missing, damaged, newer, of another training, or not of the best epoch.
        """
        best = Saved.read(path)
        if best.step > self.step:
            raise InputError(f"{path} was saved after step {best.step}, but the run resumes after step {self.step}.")
        own, other = self._identity(), best._identity()
        for key in own:
            if own[key] != other[key]:
                raise InputError(f"{path} is of another training: its {key} is {other[key]}, not {own[key]}.")
        # Every later checkpoint has the score of the best epoch.
        if best.best != self.best:
            raise InputError(f"{path} is not of the best epoch of the training: it has another score.")

    def _identity(self) -> dict[str, Any]:
        """Returns the values that all checkpoints of a training share."""
        settings = {
            key: value
            for key, value in flatten(self.to_resume())
            if not key.startswith("run.") and (key == "model.weights" or key not in _MAY_CHANGE)
        }
        names = ["data_sha256", "num_classes", "batch_size", *([] if self._is_extendable else ["total_steps"])]
        return {**settings, **{name: self.section[name] for name in names}}

    @property
    def _is_extendable(self) -> bool:
        """Whether the learning rate does not depend on the number of steps."""
        return self.experiment["model"]["schedule"] == "constant" and not self.experiment["model"]["warmup"]

    def check_evaluation(self, experiment: Experiment, dataset: Dataset, *, validates: bool) -> None:
        """Checks that the weights fit the network and the data, and that the validation split was not trained on.

        Raises:
            InputError: The settings or the data do not fit.
        """
        if self.section["num_classes"] != dataset.num_classes:
            raise InputError(
                f"{self.path} is for {self.section['num_classes']} classes, but the data have {dataset.num_classes}."
            )
        split = ("seed_everything", "data.name", "data.emnist_split", "data.val_size") if validates else ()
        self._check_equal(experiment, ("model", *split), self.experiment)

    def check_same(self, experiment: Experiment) -> None:
        """Checks that a resumed run computes the same training.

        Raises:
            InputError: A setting differs; the message has both values.
        """
        self._check_equal(experiment, ("model", "data", "trainer", "seed_everything"), self.to_resume())

    def check_resume(self, experiment: Experiment, dataset: Dataset, plan: Plan, *, may_be_done: bool = False) -> None:
        """Checks that a resumed run has the same data, batches and length; see also `check_same`.

        Args:
            experiment: The experiment of the resumed run.
            dataset: The data set of the resumed run.
            plan: The plan of the resumed run.
            may_be_done: Whether a complete training is accepted, since the run was interrupted during the test.

        Raises:
            InputError: They differ, or no step is left.
        """
        saved = self.section
        if saved["data_sha256"] != dataset.sha256:
            raise InputError(
                f"{self.path} was trained on data with the SHA-256 {saved['data_sha256']}, but here it is "
                f"{dataset.sha256}."
            )
        if saved["batch_size"] != plan.batch_size:
            raise InputError(
                f"{self.path} was trained with batches of {saved['batch_size']}, but here they would have "
                f"{plan.batch_size}: resume with as many ranks as before."
            )
        schedule, steps = experiment.model.schedule, plan.total_steps
        if saved["total_steps"] != steps and not self._is_extendable:
            raise InputError(
                f"The {schedule} schedule of {self.path} was made for {saved['total_steps']} steps and cannot be "
                f"changed to {steps}: only a constant one without warm-up can. {self._train_further()}"
            )
        if self.step > steps or (self.step == steps and not may_be_done):
            limit = "raise --epochs" if experiment.trainer.max_steps != steps else "raise --max-steps"
            at_end = f"(its {schedule} schedule is at its end). {self._train_further()}"
            more = f"({limit})." if self._is_extendable else at_end
            raise InputError(f"{self.path} has completed its {self.step} steps: there is nothing to resume {more}")

    def _train_further(self) -> str:
        """Returns advice on training the weights beyond the end of the schedule."""
        origin = find_run_folder(self.path)
        weights = shlex.quote(display_path((origin or self.path).absolute()))
        config = f"--config {shlex.quote(display_path(origin / CONFIG))} " if origin else ""
        return f"To train further, begin a new run with these weights: {config}--model.weights {weights}"

    def _check_equal(self, experiment: Experiment, sections: tuple[str, ...], saved: dict[str, Any]) -> None:
        now = dict(flatten(experiment.to_dict()))
        for key, old in flatten(saved):
            if (key in sections or key.split(".")[0] in sections) and key not in _MAY_CHANGE and now[key] != old:
                raise InputError(f"{key} is {now[key]} here, but {old} in {self.path}: leave it out.")
