"""What a checkpoint says of its experiment, and whether a run may take it up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lit_mnist.configure import flatten, read_saved_experiment
from lit_mnist.data.dataset import Dataset
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.plan import Plan
from lit_mnist.ranks import launched_from_outside
from lit_mnist.training.checkpoint import SECTION, read_checkpoint

# What may differ between a checkpoint and the run that takes it up: where and how far, not what.
_MAY_CHANGE = {
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.accelerator",
    "trainer.strategy",
    "trainer.max_epochs",
    "trainer.max_steps",
    "data.root",
    "data.eval_batch_size",
}


@dataclass(frozen=True)
class Saved:
    """A verified checkpoint, with its experiment.

    Attributes:
        path: The file.
        section: The project's own section of it.
        experiment: The experiment as nested plain values.
        step: Optimizer steps made.
    """

    path: Path
    section: dict[str, Any]
    experiment: dict[str, Any]
    step: int

    @classmethod
    def read(cls, path: Path) -> Saved:
        """Reads and verifies a checkpoint.

        Raises:
            InputError: It is damaged, or not one of this project and version.
        """
        checkpoint = read_checkpoint(path)
        section = checkpoint[SECTION]
        return cls(path, section, read_saved_experiment(section.get("experiment"), path), checkpoint["global_step"])

    def to_resume(self) -> dict[str, Any]:
        """Returns the experiment as the values to start from when the training goes on."""
        # The machine may be another, but the precision stays the one that was used.
        trainer = {**self.experiment["trainer"], "precision": self.section["precision"]}
        if launched_from_outside():
            trainer["devices"] = "auto"
        return {**self.experiment, "trainer": trainer, "run": {"threads": self.experiment["run"]["threads"]}}

    def to_evaluate(self) -> dict[str, Any]:
        """Returns the experiment as the values to start from when the weights are evaluated, on whatever devices."""
        exact = self.experiment["trainer"]["precision"] == "64-true"
        return {**self.experiment, "trainer": {"precision": "64-true" if exact else "auto"}, "run": {}}

    def check_evaluation(self, experiment: Experiment, dataset: Dataset, *, validates: bool) -> None:
        """Refuses another network, data with other classes, or a validation split that was trained on.

        Raises:
            InputError: The weights do not fit.
        """
        if self.section.get("num_classes") != dataset.num_classes:
            raise InputError(
                f"{self.path} tells {self.section.get('num_classes')} classes apart, "
                f"but the data have {dataset.num_classes}."
            )
        split = ("seed_everything", "data.name", "data.emnist_split", "data.val_size") if validates else ()
        self._check_equal(experiment, ("model", *split))

    def check_resume(self, experiment: Experiment, dataset: Dataset, plan: Plan) -> None:
        """Refuses what would make another training of it.

        Raises:
            InputError: Model, data, batches or schedule differ, or no step is left.
        """
        self._check_equal(experiment, ("model", "data", "trainer", "seed_everything"))
        trained = self.section
        if trained.get("data_sha256") != dataset.sha256:
            raise InputError(
                f"{self.path} was trained on data with the SHA-256 {trained.get('data_sha256')}, "
                f"but here they have {dataset.sha256}."
            )
        if trained.get("batch_size") != plan.batch_size:
            raise InputError(
                f"{self.path} was trained with batches of {trained.get('batch_size')}, but here they would have "
                f"{plan.batch_size}: resume with as many ranks as before."
            )
        stretchable = experiment.model.schedule == "constant" and not experiment.model.warmup
        if trained.get("total_steps") != plan.total_steps and not stretchable:
            raise InputError(
                f"The {experiment.model.schedule} schedule of {self.path} was made for {trained.get('total_steps')} "
                f"steps and cannot be stretched to {plan.total_steps}: only a constant one without warm-up can."
            )
        if self.step >= plan.total_steps:
            limit = "raise --epochs" if experiment.trainer.max_steps != plan.total_steps else "raise --max-steps"
            more = limit if stretchable else f"its {experiment.model.schedule} schedule is at its end"
            raise InputError(f"{self.path} has made its {self.step} steps: there is nothing to go on with ({more}).")

    def _check_equal(self, experiment: Experiment, sections: tuple[str, ...]) -> None:
        now = dict(flatten(experiment.to_dict()))
        for key, old in flatten(self.to_resume()):
            if (key in sections or key.split(".")[0] in sections) and key not in _MAY_CHANGE and now[key] != old:
                raise InputError(f"{key} is {now[key]} here, but {old} in {self.path}: leave it out.")
