"""Step 3, load: the data set or the user's own images, and the weights that a training starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lit_mnist.checkpoint.weights import read_weights
from lit_mnist.cli.validate import Validated
from lit_mnist.data.dataset import Dataset, Split, dataset_of
from lit_mnist.distributed.rank import print_once
from lit_mnist.experiment import SEGMENTATION_NAMES
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
        dataset = dataset_of(experiment.data, fetch=fetch)
        return dataset, split_dataset(experiment, dataset), ()
    # Only a prediction of one's own images needs what this imports.
    from lit_mnist.predict.images import find_images, read_digits
    from lit_mnist.predict.masks import user_images

    files = tuple(find_images([Path(image) for image in request.images]))
    if experiment.data.name in SEGMENTATION_NAMES:
        # Only the names of the classes are needed, and a user may not have the data set's files.
        dataset = user_images(files, experiment.data)
        return dataset, Splits(dataset.train, dataset.train, dataset.test), files
    dataset = dataset_of(experiment.data, fetch=fetch)
    digits = read_digits(files)
    own = Split(digits, torch.zeros(len(digits), dtype=torch.int64))
    return dataset, replace(split_dataset(experiment, dataset), test=own), files
