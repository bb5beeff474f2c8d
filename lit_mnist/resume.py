"""What a checkpoint says of its experiment, and whether a run may take it up."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from lit_mnist.configure import configure, flatten
from lit_mnist.data.dataset import Dataset
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.plan import Plan
from lit_mnist.ranks import launched_from_outside
from lit_mnist.training.checkpoint import SECTION, read_checkpoint
from lit_mnist.training.precision import UsedPrecision

# What a setting of a saved experiment may look like, where it is no path.
_WORD = re.compile(r"[\w.:=,+-]*")
_PATHS = ("data.root", "model.weights", "run.dir", "run.resume")
_LONGEST = 3_000
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


# What is read of a checkpoint before the ranks start, and restored in them.
_KINDS = {
    "global_step": int,
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
_SECTION_KINDS = {
    "experiment": dict,
    "precision": str,
    "data_sha256": str,
    "num_classes": int,
    "batch_size": int,
    "total_steps": int,
}
_MOST_CLASSES = 1000


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
        for values, kinds in ((checkpoint, _KINDS), (section, _SECTION_KINDS)):
            for name, kind in kinds.items():
                if type(values.get(name)) is not kind:
                    raise InputError(
                        f"{path} is not a checkpoint of a run: its {name} is not there, or of another type."
                    )
        experiment = _read_experiment(section["experiment"], path)
        _check_weights(path, checkpoint["state_dict"], section["num_classes"], experiment)
        if checkpoint["global_step"] < 0 or section["precision"] not in get_args(UsedPrecision):
            raise InputError(f"{path} is not a checkpoint of a run: its step or its precision is none.")
        return cls(path, section, experiment, checkpoint["global_step"])

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
        trainer, model = {"precision": "64-true" if exact else "auto"}, {**self.experiment["model"], "compile": False}
        return {**self.experiment, "model": model, "trainer": trainer, "run": {}}

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
        self._check_equal(experiment, ("model", *split))

    def check_same(self, experiment: Experiment) -> None:
        """Refuses settings that would make another training of it.

        Raises:
            InputError: One differs; the message names both values.
        """
        self._check_equal(experiment, ("model", "data", "trainer", "seed_everything"))

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
        stretchable = experiment.model.schedule == "constant" and not experiment.model.warmup
        if trained["total_steps"] != plan.total_steps and not stretchable:
            raise InputError(
                f"The {experiment.model.schedule} schedule of {self.path} was made for {trained.get('total_steps')} "
                f"steps and cannot be changed to {plan.total_steps}: only a constant one without warm-up can."
            )
        if self.step > plan.total_steps or (self.step == plan.total_steps and not may_be_done):
            limit = "raise --epochs" if experiment.trainer.max_steps != plan.total_steps else "raise --max-steps"
            more = limit if stretchable else f"its {experiment.model.schedule} schedule is at its end"
            raise InputError(f"{self.path} has made its {self.step} steps: there is nothing to go on with ({more}).")

    def _check_equal(self, experiment: Experiment, sections: tuple[str, ...]) -> None:
        now = dict(flatten(experiment.to_dict()))
        for key, old in flatten(self.to_resume()):
            if (key in sections or key.split(".")[0] in sections) and key not in _MAY_CHANGE and now[key] != old:
                raise InputError(f"{key} is {now[key]} here, but {old} in {self.path}: leave it out.")


def _check_weights(path: Path, weights: dict[str, Any], num_classes: int, experiment: dict[str, Any]) -> None:
    """Refuses weights that are not those of the experiment's network.

    Raises:
        InputError: A name or a shape is another one.
    """
    if not 0 < num_classes <= _MOST_CLASSES:
        raise InputError(f"{path} tells {num_classes} classes apart: no data set here has as many.")
    # Shapes alone: on this device nothing is computed or kept.
    with torch.device("meta"):
        net = build_net(ModelSettings(**{**experiment["model"], "compile": False}), num_classes=num_classes, seed=0)
    wanted = {f"net.{name}": tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    found = {name: tuple(getattr(tensor, "shape", ())) for name, tensor in weights.items()}
    if wanted != found or not all(isinstance(tensor, torch.Tensor) for tensor in weights.values()):
        raise InputError(f"{path} does not hold the weights of a {experiment['model']['net']}.")


def _read_experiment(values: object, source: Path) -> dict[str, Any]:
    """Returns the experiment that a checkpoint holds, checked through the parser that checks every configuration.

    Args:
        values: Nested plain values.
        source: Where they come from, for the message.

    Raises:
        InputError: They are no experiment of this version.
    """
    try:
        flat = dict(flatten(values)) if isinstance(values, Mapping) else {}
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
    except TypeError as error:
        raise InputError(f"{source} holds an experiment that is not of plain values: {error}.") from error
    if not flat:
        raise InputError(f"{source} holds no experiment.")
    known = {key for key, _ in flatten(Experiment().to_dict())}
    unknown = sorted(set(flat) - known)
    # The parser takes a text for YAML, of which a short one can become gigabytes: no setting but a path needs marks.
    odd = [key for key, text in texts.items() if len(text) > _LONGEST or ("&" in text and "*" in text)]
    odd += [
        key
        for key, value in flat.items()
        if key not in _PATHS and isinstance(value, str) and not _WORD.fullmatch(value)
    ]
    if unknown or odd:
        raise InputError(
            f"{source} holds an experiment that this version does not know ({', '.join(unknown + odd)[:200]})."
        )
    try:
        return configure([f"--{key}={text}" for key, text in texts.items()]).experiment.to_dict()
    except InputError as error:
        raise InputError(f"{source} holds an experiment that this version does not take: {error}") from error
