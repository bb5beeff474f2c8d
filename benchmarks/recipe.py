"""The experiment whose training the bench times: its configuration and its data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.cli.request import parse
from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.sample_order import validation_split
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.plan import Plan, make_plan
from lit_mnist.run.settings import RunSettings


@dataclass(frozen=True)
class Recipe:
    """The experiment to time.

    Attributes:
        experiment: The experiment as it was asked for.
        config: The file that asks for it; None for the default experiment.
        train_count: Training samples of one of its epochs.
        timed_count: Training samples of the timed runs.
    """

    experiment: Experiment
    config: Path | None
    train_count: int
    timed_count: int

    @classmethod
    def read(cls, config: Path | None) -> Recipe:
        """Returns the recipe of a configuration file; every file of its data was found valid.

        Raises:
            InputError: The configuration is rejected, or the data are missing or damaged.
        """
        experiment = _configured(config) if config else Experiment()
        data = experiment.data
        whole = len(load_dataset(data).train)
        train, _ = validation_split(experiment.seed_everything, whole, data.val_size)
        return cls(experiment, config, len(train[: data.train_size]), whole)

    def plan(self, devices: int) -> Plan:
        """Returns the plan of the whole training on so many devices.

        Raises:
            InputError: Its batches cannot be split over them.
        """
        return make_plan(self.experiment, devices, self.train_count)

    def timed(self, steps: int, kind: str) -> Experiment:
        """Returns what the timed runs train: the same for a few steps, with nothing beside the steps.

        Args:
            steps: Optimizer steps.
            kind: `cpu` or `cuda`.
        """
        data = self.experiment.data
        root = Path(data.root).expanduser().absolute() if data.root else None
        return (
            Experiment(self.experiment.seed_everything, self.experiment.model, data, self.experiment.trainer)
            .replace("model", weights="none")
            .replace("data", root=str(root) if root else None, val_size=0, train_size=None, test_size=None)
            .replace("trainer", accelerator="gpu" if kind == "cuda" else "cpu", devices="auto", num_nodes=1)
            .replace("trainer", max_steps=steps, max_epochs=steps)
            .replace("run", timeout=max(RunSettings.timeout, self.experiment.run.timeout))
        )

    def notes(self) -> Iterator[str]:
        """Yields what a reader must know of how the timed runs differ from the experiment."""
        if self.experiment.model.weights != "none":
            yield "The timed runs start from random weights: a step takes as long as with trained ones."


def _configured(config: Path) -> Experiment:
    found = parse([f"--config={config}"])
    if found.options:
        raise InputError(
            f"trainer.{found.options[0]} in {config} is for Lightning's Trainer, and the engines that are timed "
            "here do not have it: remove it."
        )
    if found.classes:
        raise InputError(
            f"{config} names a class for {min(found.classes)}: only the project's experiment is timed here."
        )
    return found.experiment()
