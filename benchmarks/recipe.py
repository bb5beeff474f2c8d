"""The experiment whose training the bench times: its configuration, and its data or a substitute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.cli.request import parse
from lit_mnist.data.dataset import load_dataset
from lit_mnist.data.download import user_cache
from lit_mnist.distributed.sample_order import validation_split
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment, RunSettings
from lit_mnist.experiment.plan import Plan, make_plan

# Images in VOC's own list `train` of its segmentation task: http://host.robots.ox.ac.uk/pascal/VOC/voc2012/.
VOC_TRAIN = 1464


@dataclass(frozen=True)
class Recipe:
    """The experiment to time.

    Attributes:
        experiment: The experiment as it was asked for.
        config: The file that asks for it; None for the default experiment.
        train_count: Training samples of one of its epochs.
        timed_count: Training samples of the timed runs.
        stand_in: The folder of images that stand in for Pascal VOC where that is not on this machine; else None.
    """

    experiment: Experiment
    config: Path | None
    train_count: int
    timed_count: int
    stand_in: Path | None

    @classmethod
    def read(cls, config: Path | None) -> Recipe:
        """Returns the recipe of a configuration file; every file of its data was found valid.

        Raises:
            InputError: The configuration is rejected, or the data are missing or damaged.
        """
        experiment = _configured(config) if config else Experiment()
        data, stand_in = experiment.data, None
        if _lacks_voc(data):
            stand_in = _shapes_folder()
            whole = VOC_TRAIN
            timed = len(load_dataset(_standing_in(data, stand_in)).train)
        else:
            whole = timed = len(load_dataset(data).train)
        train, _ = validation_split(experiment.seed_everything, whole, data.val_size)
        return cls(experiment, config, len(train[: data.train_size]), timed, stand_in)

    @property
    def is_segmentation(self) -> bool:
        """Whether each pixel has a class."""
        return self.experiment.data.task.pixelwise

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
        root = self.stand_in or (Path(data.root).expanduser().absolute() if data.root else None)
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
        if self.stand_in:
            yield (
                "Stand-in: Pascal VOC is not on this machine. What a step takes does not depend on what the images "
                f"show, so the runs read images of shapes in its place, brought to the same {self._size}, as many a "
                f"batch, with VOC's classes. An epoch is that of VOC: {VOC_TRAIN:,} training images. The "
                "shapes are smaller files, which take less time to decode; workers hide that time as long as they "
                "keep up."
            )
        if self.experiment.model.weights != "none":
            yield "The timed runs start from random weights: a step takes as long as with trained ones."

    @property
    def _size(self) -> str:
        size = self.experiment.data.image_size
        return f"{size} x {size} pixels"


def _configured(config: Path) -> Experiment:
    found = parse([f"--config={config}"])
    if found.extras.names:
        raise InputError(
            f"trainer.{found.extras.names[0]} in {config} is for Lightning's Trainer, and the engines that are timed "
            "here do not have it: leave it out."
        )
    return found.experiment()


def _lacks_voc(data: DataSettings) -> bool:
    """Returns whether to substitute VOC: it is missing, and the configuration does not name its folder."""
    if data.name != "voc2012" or data.root or data.download:
        return False
    from lit_mnist.data.segmentation.voc import find_voc2012

    return find_voc2012(user_cache()) is None


def _shapes_folder() -> Path:
    """Returns the folder of the shapes, in the format of VOC; generates them if they are missing."""
    from lit_mnist.data.segmentation.shapes import NAME

    folder = user_cache() / NAME
    if not folder.is_dir():
        load_dataset(DataSettings(name="shapes"))
    return folder


def _standing_in(data: DataSettings, folder: Path) -> DataSettings:
    return DataSettings(name=data.name, root=str(folder), border=data.border)
