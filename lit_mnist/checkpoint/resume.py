"""What a checkpoint says of its experiment, and whether a run may take it up."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.format import SECTION, read_checkpoint
from lit_mnist.checkpoint.saved_experiment import checked_experiment, experiment_of_a_trainer
from lit_mnist.checkpoint.state import KEEPER
from lit_mnist.checkpoint.store import CONFIG, run_folder_of
from lit_mnist.data.dataset import Dataset
from lit_mnist.distributed.rank import cores, launched_from_outside, print_once, threads_per_rank
from lit_mnist.distributed.terminal import shown
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment, flatten
from lit_mnist.experiment.plan import Plan

# Where data are read, and whether they are downloaded.
_PLACES = {"root", "download"}
# What may differ between a checkpoint and the run that takes it up: where, how and how far, not what.
_MAY_CHANGE = {
    "model.compile",
    "model.weights",
    "model.checkpoint_activations",
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
    """A verified checkpoint, with its experiment.

    Attributes:
        path: The file.
        section: The project's own section of it.
        experiment: The experiment as nested plain values.
        step: Optimizer steps made.
        best: The best score on the validation split until then; below 0 for none.
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
            hashed: As of `read_checkpoint`.

        Raises:
            InputError: It is damaged, or not one of this project and version.
        """
        checkpoint = read_checkpoint(path, hashed=hashed)
        if SECTION not in checkpoint:
            return cls._of_a_trainer(path, checkpoint)
        section = checkpoint[SECTION]
        experiment = checked_experiment(path, checkpoint)
        kept = checkpoint["callbacks"].get(KEEPER)
        best = kept.get("best") if isinstance(kept, dict) else None
        return cls(path, section, experiment, checkpoint["global_step"], best if isinstance(best, float) else -1.0)

    def is_in(self, folder: Path) -> bool:
        """Returns whether it lies in a folder."""
        return self.path.resolve().parent == folder.resolve()

    @classmethod
    def _of_a_trainer(cls, path: Path, checkpoint: Mapping[str, Any]) -> Saved:
        """Returns a checkpoint that a Trainer wrote by itself: of its experiment it holds the model and the seed."""
        num_classes, experiment = experiment_of_a_trainer(path, checkpoint)
        print_once(
            f"note: {shown(path.absolute())} was written by Trainer.save_checkpoint: it has no SHA-256, so that it was "
            "not verified, and does not tell on which data it was trained"
        )
        return cls(path, {"num_classes": num_classes}, experiment, checkpoint["global_step"], best=-1.0)

    def to_resume(self) -> dict[str, Any]:
        """Returns the experiment as the values to start from when the training continues.

        Data are read where the checkpoint says, but see `may_fetch`: a file from elsewhere must not choose what is
        downloaded.
        """
        # The machine may be another, but the precision stays the one that was used.
        trainer = {**self.experiment["trainer"], "precision": self.section["precision"]}
        if launched_from_outside():
            trainer["devices"] = "auto"
        data, run = {**self.experiment["data"], "download": False}, {"threads": self.experiment["run"]["threads"]}
        return {**self.experiment, "data": data, "trainer": trainer, "run": run}

    def to_evaluate(self) -> dict[str, Any]:
        """Returns the experiment as the values to start from when the weights are evaluated, on whatever devices.

        The place of the data, and whether they are downloaded, are the command line's to say, or the defaults'.
        """
        exact = self.experiment["trainer"]["precision"] == "64-true"
        trainer, model = {"precision": "64-true" if exact else "auto"}, {**self.experiment["model"], "compile": False}
        data = {key: value for key, value in self.experiment.get("data", {}).items() if key not in _PLACES}
        return {**self.experiment, "model": model, "data": data, "trainer": trainer, "run": {}}

    def may_fetch(self, given: Mapping[str, Any], data: DataSettings, *, trains: bool) -> bool:
        """Returns whether data that are missing may be downloaded or made: never only because a checkpoint says so.

        Args:
            given: The settings that the command line and its files give, by their dotted keys.
            data: What it has come to.
            trains: Whether the training continues: then the data's place may be the checkpoint's.
        """
        if data.name == "mnist":  # Part of the package.
            return True
        if trains:
            return data.root is None or given.get("data.root") is not None
        return data.download or given.get("data.name") == data.name

    def threads(self, setting: int | None, ranks: int, report: Callable[[str], None]) -> int:
        """Returns the number of threads of each rank with which the training continues: the one that was used.

        Args:
            setting: `run.threads` as the command line or the first start of the training set it; None for neither.
            ranks: Ranks of this machine.
            report: Is told where the number cannot be the same, or is not what this machine would be given.
        """
        used, before = int(self.section["threads"]), self.section.get("local_world_size")
        before = before if isinstance(before, int) else None
        if setting is None and before == ranks:
            own = threads_per_rank(None, ranks)
            if own != used:
                report(
                    f"each rank computes with {used} thread{'s' * (used != 1)}, as before, where {cores()} cores would "
                    f"give it {own}: --run.threads sets another number, with which the result is not bit-identical."
                )
            return used
        chosen = threads_per_rank(setting, ranks)
        if chosen != used:
            why = (
                f"run.threads is {setting}"
                if setting
                else f"there were {before or 'another number of'} ranks per machine before, and here are {ranks}"
            )
            report(
                f"each rank computes with {chosen} thread{'s' * (chosen != 1)}, but with {used} before ({why}): the "
                "result is not bit-identical to an uninterrupted run's."
            )
        return chosen

    def check_best(self, path: Path) -> None:
        """Rejects a checkpoint that is not the best of this training until its step.

        Raises:
            InputError: It is missing or damaged, was made later, or is of another training or not its best epoch.
        """
        best = Saved.read(path)
        if best.step > self.step:
            raise InputError(f"{path} was made after step {best.step}, and the run goes on after step {self.step}.")
        mine, other = self._identity(), best._identity()
        for key in mine:
            if mine[key] != other[key]:
                raise InputError(f"{path} is of another training: its {key} is {other[key]}, not {mine[key]}.")
        # Every checkpoint since has the score of the best.
        if best.best != self.best:
            raise InputError(f"{path} is not the best epoch of the training: its score is another.")

    def _identity(self) -> dict[str, Any]:
        """Returns what two checkpoints of one training have in common."""
        settings = {
            key: value
            for key, value in flatten(self.to_resume())
            if not key.startswith("run.") and (key == "model.weights" or key not in _MAY_CHANGE)
        }
        names = ["data_sha256", "num_classes", "batch_size", *([] if self._is_stretchable else ["total_steps"])]
        return {**settings, **{name: self.section[name] for name in names}}

    @property
    def _is_stretchable(self) -> bool:
        """Whether the learning rate does not depend on the number of steps."""
        return self.experiment["model"]["schedule"] == "constant" and not self.experiment["model"]["warmup"]

    def check_evaluation(self, experiment: Experiment, dataset: Dataset, *, validates: bool) -> None:
        """Refuses another network, data with other classes, or a validation split that was trained on.

        Raises:
            InputError: The weights do not fit.
        """
        if self.section["num_classes"] != dataset.num_classes:
            raise InputError(
                f"{self.path} tells {self.section.get('num_classes')} classes apart, "
                f"but the data have {dataset.num_classes}."
            )
        split = ("seed_everything", "data.name", "data.emnist_split", "data.val_size") if validates else ()
        self._check_equal(experiment, ("model", *split), self.experiment)

    def check_same(self, experiment: Experiment) -> None:
        """Refuses settings that would make another training of it.

        Raises:
            InputError: One differs; the message names both values.
        """
        self._check_equal(experiment, ("model", "data", "trainer", "seed_everything"), self.to_resume())

    def check_resume(self, experiment: Experiment, dataset: Dataset, plan: Plan, *, may_be_done: bool = False) -> None:
        """Refuses data, batches and a length that would make another training of it; see also `check_same`.

        Args:
            experiment: The experiment that is to go on.
            dataset: Its data.
            plan: Its plan.
            may_be_done: Whether the training may be complete, since the run that was interrupted then was testing.

        Raises:
            InputError: Model, data, batches or schedule differ, or no step is left.
        """
        trained = self.section
        if trained["data_sha256"] != dataset.sha256:
            raise InputError(
                f"{self.path} was trained on data with the SHA-256 {trained.get('data_sha256')}, "
                f"but here they have {dataset.sha256}."
            )
        if trained["batch_size"] != plan.batch_size:
            raise InputError(
                f"{self.path} was trained with batches of {trained.get('batch_size')}, but here they would have "
                f"{plan.batch_size}: resume with as many ranks as before."
            )
        schedule, stretchable = experiment.model.schedule, self._is_stretchable
        if trained["total_steps"] != plan.total_steps and not stretchable:
            raise InputError(
                f"The {schedule} schedule of {self.path} was made for {trained.get('total_steps')} steps and cannot be "
                f"changed to {plan.total_steps}: only a constant one without warm-up can. {self._train_further()}"
            )
        if self.step > plan.total_steps or (self.step == plan.total_steps and not may_be_done):
            limit = "raise --epochs" if experiment.trainer.max_steps != plan.total_steps else "raise --max-steps"
            more = f"({limit})." if stretchable else f"(its {schedule} schedule is at its end). {self._train_further()}"
            raise InputError(f"{self.path} has made its {self.step} steps: there is nothing to go on with {more}")

    def _train_further(self) -> str:
        """Returns how to train these weights beyond the end of their schedule."""
        origin = run_folder_of(self.path)
        weights = shlex.quote(shown((origin or self.path).absolute()))
        config = f"--config {shlex.quote(shown(origin / CONFIG))} " if origin else ""
        return f"To train further, begin a new run with these weights: {config}--model.weights {weights}"

    def _check_equal(self, experiment: Experiment, sections: tuple[str, ...], saved: dict[str, Any]) -> None:
        now = dict(flatten(experiment.to_dict()))
        for key, old in flatten(saved):
            if (key in sections or key.split(".")[0] in sections) and key not in _MAY_CHANGE and now[key] != old:
                raise InputError(f"{key} is {now[key]} here, but {old} in {self.path}: leave it out.")
