"""The two tasks, classification and segmentation, with their networks, data sets and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import DATASETS, NETWORKS

if TYPE_CHECKING:
    from lit_mnist.experiment.experiment import Experiment


@dataclass(frozen=True)
class Task:
    """What a network predicts for an image: one class, or a class for each pixel.

    Attributes:
        data_names: The project's data sets of the task.
        nets: The project's networks of the task. Registered networks and data sets are for classification.
        augmentations: The supported values of `data.augment`.
        options: The options of this task alone; the other task rejects values other than the default.
        eval_batch_size: Default number of samples that a rank evaluates at once.
        metrics: The names of the validation metrics; the last one selects the best weights.
        pixelwise: Whether the network predicts a class for each pixel.
    """

    data_names: tuple[str, ...]
    nets: tuple[str, ...]
    augmentations: tuple[str, ...]
    options: tuple[str, ...]
    eval_batch_size: int
    metrics: tuple[str, ...]
    pixelwise: bool


CLASSIFICATION = Task(
    data_names=("mnist", "fashion_mnist", "kmnist", "qmnist", "emnist"),
    nets=("convnet", "basicnet"),
    augmentations=("none", "shift", "affine"),
    options=("model.views", "model.compile", "data.max_shift", "data.max_rotate", "data.max_scale"),
    eval_batch_size=1000,
    metrics=("val_loss", "val_accuracy"),
    pixelwise=False,
)
SEGMENTATION = Task(
    data_names=("voc2012", "shapes"),
    nets=("deeplabv3_resnet101", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "deeplabv3_small"),
    augmentations=("none", "crop"),
    options=("model.checkpoint_activations", "data.image_size", "data.border", "data.download"),
    eval_batch_size=16,
    metrics=("val_loss", "val_accuracy", "val_mean_iou"),
    pixelwise=True,
)
_WITHOUT_PUBLISHED_BACKBONE = (*CLASSIFICATION.nets, "deeplabv3_small")


def task_of(data_name: str) -> Task:
    """Returns the task of a data set."""
    return SEGMENTATION if data_name in SEGMENTATION.data_names else CLASSIFICATION


def check_task(experiment: Experiment) -> None:
    """Checks that the settings of an experiment fit each other.

    Raises:
        InputError: Two settings contradict each other, or one has no effect on the data set.
    """
    model, data = experiment.model, experiment.data
    task, other = (SEGMENTATION, CLASSIFICATION) if data.task is SEGMENTATION else (CLASSIFICATION, SEGMENTATION)
    nets, others = ((*task.nets, *NETWORKS), other.data_names)
    if task is SEGMENTATION:
        nets, others = task.nets, (*other.data_names, *DATASETS)
    if model.net not in nets:
        raise InputError(
            f"model.net {model.net} does not fit data.name {data.name}: choose model.net {_either(nets)}, or "
            f"data.name {_either(others)}."
        )
    if data.augment not in task.augmentations:
        raise InputError(
            f"data.augment {data.augment} does not apply to data.name {data.name}: choose "
            f"{_either(task.augmentations)}."
        )
    for key in (*other.options, *(["data.download"] if data.name == "shapes" else [])):
        section, _, name = key.partition(".")
        settings = getattr(experiment, section)
        if getattr(settings, name) != getattr(type(settings), name):
            raise InputError(f"{key} {getattr(settings, name)} does not apply to data.name {data.name}: leave it out.")
    if model.weights == "backbone" and model.net in (*_WITHOUT_PUBLISHED_BACKBONE, *NETWORKS):
        raise InputError(f"model.weights backbone: {model.net} has no published weights: leave it out.")
    if model.lr_scale != "none" and data.batch_per != "rank":
        raise InputError(
            f"model.lr_scale {model.lr_scale} requires data.batch_per rank, which multiplies the batch by the number "
            "of ranks: set both, or leave it out."
        )
    _check_registered(experiment)


def _check_registered(experiment: Experiment) -> None:
    """Rejects options that a registered network or data set does not use."""
    model, data = experiment.model, experiment.data
    net, dataset = NETWORKS.get(model.net), DATASETS.get(data.name)
    if net and model.compile:
        raise InputError(f"model.compile does not apply to model.net {model.net}: leave it out.")
    if net and model.views != 1 and "views" not in net.arguments:
        raise InputError(
            f"model.views {model.views} does not apply to model.net {model.net}: leave it out, or give "
            f"{net.path} an argument views."
        )
    if dataset and data.root is not None and "root" not in dataset.arguments:
        raise InputError(
            f"data.root {data.root} does not apply to data.name {data.name}: leave it out, or give {dataset.path} an "
            "argument root."
        )


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
