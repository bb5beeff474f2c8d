"""The samples that a command works on: the data set's, or the user's own images in place of its test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from lit_mnist.data.dataset import Dataset, Split, dataset_of
from lit_mnist.experiment import SEGMENTATION_NAMES, Experiment
from lit_mnist.training.job import Splits, split_dataset


def load_samples(
    experiment: Experiment, images: Sequence[Path], *, fetch: bool = True
) -> tuple[Dataset, Splits, tuple[Path, ...]]:
    """Loads the samples, all of which can be read.

    Args:
        experiment: What is trained on or evaluated.
        images: The user's images or folders of them; none for those of the data set.
        fetch: Whether data that are missing may be downloaded or made.

    Returns:
        The data set; its samples, as the experiment splits them; the user's images, which stand in the test split.

    Raises:
        InputError: The data are missing or damaged, or a image cannot be read.
    """
    if not images:
        dataset = dataset_of(experiment.data, fetch=fetch)
        return dataset, split_dataset(experiment, dataset), ()
    # Whoever does not predict need not wait for what this imports.
    from lit_mnist.predict.images import find_images, read_digits
    from lit_mnist.predict.masks import user_images

    files = tuple(find_images(images))
    if experiment.data.name in SEGMENTATION_NAMES:
        # Nothing of the data set is needed but the names of its classes, and who predicts may not have its files.
        dataset = user_images(files, experiment.data)
        return dataset, Splits(dataset.train, dataset.train, dataset.test), files
    dataset = dataset_of(experiment.data, fetch=fetch)
    digits = read_digits(files)
    own = Split(digits, torch.zeros(len(digits), dtype=torch.int64))
    return dataset, replace(split_dataset(experiment, dataset), test=own), files
