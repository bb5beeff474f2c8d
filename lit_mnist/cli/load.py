"""Step 3, load: the data set or the user's own images, and the weights that a training starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from lit_mnist.checkpoint.weights import read_weights
from lit_mnist.cli.validate import Validated
from lit_mnist.data.dataset import Dataset, load_dataset
from lit_mnist.distributed.rank import print_once
from lit_mnist.errors import InputError
from lit_mnist.training.job import Splits, split_dataset


@dataclass(frozen=True)
class Loaded:
    """What is loaded once for all ranks.

    Attributes:
        dataset: The data set, verified.
        splits: Its samples, as the experiment splits them.
        files: The user's images, if there are any; `splits.test` then contains them.
        weights: Weights to start a training from, by name; None for random ones or those of a checkpoint.
    """

    dataset: Dataset
    splits: Splits
    files: tuple[Path, ...]
    weights: Mapping[str, torch.Tensor] | None


def load(validated: Validated) -> Loaded:
    """Loads the samples and the initial weights.

    Raises:
        InputError: Data or weights are missing or damaged, or an image cannot be read.
    """
    dataset, splits, files = _samples(validated)
    weights = None
    if validated.saved is None:
        weights = read_weights(validated.experiment.model, num_classes=dataset.num_classes, report=print_once)
    return Loaded(dataset, splits, files, weights)


def _samples(validated: Validated) -> tuple[Dataset, Splits, tuple[Path, ...]]:
    """Returns the data set, its splits, and the user's images in place of the test split."""
    request, experiment, saved = validated.request, validated.experiment, validated.saved
    fetch = saved is None or saved.may_fetch(request.settings, experiment.data, trains=request.trains)
    if not request.images:
        dataset = load_dataset(experiment.data, fetch=fetch)
        stage: Literal["test", "predict"] = "predict" if request.command == "predict" else "test"
        return dataset, split_dataset(experiment, dataset, stage), ()
    if experiment.trainer.limit_of("predict") is not None:
        raise InputError("trainer.limit_predict_batches is for the test split: name fewer --images instead.")
    # Imported here because only this command needs it.
    from lit_mnist.predict import get_prediction_module
    from lit_mnist.predict.user_images import find_images

    files = tuple(find_images([Path(image) for image in request.images]))
    dataset = get_prediction_module(experiment.data.task).load_user_images(files, experiment.data, fetch=fetch)
    return dataset, Splits(dataset.train, dataset.train, dataset.test), files
