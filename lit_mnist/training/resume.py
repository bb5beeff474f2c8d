"""A verified checkpoint of the experiment, and what must fit for it to be resumed or evaluated."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.config import check_same_settings
from lit_mnist.checkpoint.format import SECTION
from lit_mnist.checkpoint.saved import Saved
from lit_mnist.checkpoint.store import CONFIG, find_run_folder
from lit_mnist.data.dataset import Dataset
from lit_mnist.distributed.rank import launched_from_outside
from lit_mnist.distributed.terminal import display_path
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.experiment.plan import Plan
from lit_mnist.training.saved_experiment import read_experiment, read_trainer_experiment

# What a checkpoint has of the training besides its settings.
_IDENTITY = ("data_sha256", "num_classes", "batch_size")


@dataclass(frozen=True)
class SavedExperiment(Saved):
    """A verified checkpoint of the experiment. One of a stock Trainer has only the model and the seed of it."""

    @classmethod
    def _read_settings(
        cls, path: Path, checkpoint: Mapping[str, Any], *, resumes: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        if SECTION in checkpoint:
            section, _ = super()._read_settings(path, checkpoint, resumes=resumes)
            return section, read_experiment(path, checkpoint)
        if resumes:
            raise InputError(
                f"{path} does not have the settings that a run resumes from: evaluate it with test --ckpt, or resume "
                "it in Python with trainer.fit(..., ckpt_path=...)."
            )
        num_classes, experiment = read_trainer_experiment(path, checkpoint)
        return {"num_classes": num_classes}, experiment

    def to_resume(self) -> dict[str, Any]:
        """Returns the default settings of a resumed run, with the data folder."""
        # The machine may differ, but not the precision.
        trainer = {**self.config["trainer"], "precision": self.section["precision"]}
        if launched_from_outside():
            trainer["devices"] = "auto"
        return {**self.config, "trainer": trainer, "run": {"threads": self.config["run"]["threads"]}}

    def to_evaluate(self) -> dict[str, Any]:
        """Returns the default settings of an evaluation, without those for devices and the data folder."""
        is_double = self.config["trainer"]["precision"] == "64-true"
        trainer = {"precision": "64-true" if is_double else "auto"}
        model = {**self.config["model"], "compile": False}
        data = self.config.get("data", {})
        data = {key: value for key, value in data.items() if key != "root"}
        return {**self.config, "model": model, "data": data, "trainer": trainer, "run": {}}

    def may_fetch(self, given: Mapping[str, Any], data: DataSettings, *, trains: bool) -> bool:
        """Returns whether missing data may be downloaded, which the user and not the checkpoint decides.

        Args:
            given: The settings of the command line and its configuration files, by dotted keys.
            data: The resulting settings.
            trains: Whether the run resumes a training run, whose data folder may come from the checkpoint.
        """
        if data.name == "mnist":  # Part of the package.
            return True
        if trains:
            return data.root is None or given.get("data.root") is not None
        return given.get("data.name") == data.name

    def _identity(self) -> dict[str, Any]:
        names = [*_IDENTITY, *([] if self._is_extendable else ["total_steps"])]
        return {**super()._identity(), **{name: self.section[name] for name in names}}

    @property
    def _is_extendable(self) -> bool:
        """Whether the learning rate does not depend on the number of steps."""
        return self.config["model"]["schedule"] == "constant" and not self.config["model"]["warmup"]

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
        check_same_settings(experiment.to_dict(), self.config, self.path, sections=("model", *split))

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
