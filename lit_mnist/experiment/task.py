"""Which settings go together: a network and a data set are of one task, and some options are of one task alone."""

from __future__ import annotations

from collections.abc import Sequence

from lit_mnist.errors import InputError
from lit_mnist.experiment import DATA_NAMES, SEGMENTATION_NAMES, DataSettings, Experiment

DIGIT_NETS = ("convnet", "basicnet")
SEGMENTATION_NETS = ("deeplabv3_resnet101", "deeplabv3_resnet50", "deeplabv3_mobilenet_v3_large", "deeplabv3_small")
_WITHOUT_PUBLISHED_BACKBONE = (*DIGIT_NETS, "deeplabv3_small")


def check_task(experiment: Experiment) -> None:
    """Refuses settings that do not go together.

    Raises:
        InputError: Two contradict each other, or one means nothing for the data set.
    """
    model, data = experiment.model, experiment.data
    scenes = data.name in SEGMENTATION_NAMES
    nets = SEGMENTATION_NETS if scenes else DIGIT_NETS
    if model.net not in nets:
        sets = SEGMENTATION_NAMES if model.net in SEGMENTATION_NETS else DATA_NAMES
        raise InputError(
            f"model.net {model.net} does not fit data.name {data.name}: choose model.net {_either(nets)}, or data.name "
            f"{_either(sets)}."
        )
    augmentations = ("none", "crop") if scenes else ("none", "shift", "affine")
    if data.augment not in augmentations:
        raise InputError(
            f"data.augment {data.augment} means nothing for data.name {data.name}: choose {_either(augmentations)}."
        )
    refused = {
        f"model.views {model.views}": scenes and model.views > 1,
        "model.compile": scenes and model.compile,
        "model.checkpoint_activations": not scenes and model.checkpoint_activations,
        f"data.image_size {data.image_size}": not scenes and data.image_size != DataSettings.image_size,
        f"data.border {data.border}": not scenes and data.border != "ignore",
        "data.download": data.name != "voc2012" and data.download,
    }
    for name in ("max_shift", "max_rotate", "max_scale"):
        value = getattr(data, name)
        refused[f"data.{name} {value}"] = scenes and value != getattr(DataSettings, name)
    for name, is_refused in refused.items():
        if is_refused:
            raise InputError(f"{name} is not offered for data.name {data.name}: leave it out.")
    if model.weights == "backbone" and model.net in _WITHOUT_PUBLISHED_BACKBONE:
        raise InputError(f"model.weights backbone: there are no published weights for a {model.net}: leave it out.")
    if model.lr_scale != "none" and data.batch_per != "rank":
        raise InputError(
            f"model.lr_scale {model.lr_scale} follows the batch that data.batch_per rank multiplies by the ranks: set "
            "that, too, or leave it out."
        )


def _either(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
