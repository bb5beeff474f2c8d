"""The samples of a command: those of the data set, or a user's images instead of its test set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lit_mnist.data.dataset import Dataset, load_dataset
from lit_mnist.experiment import Experiment
from lit_mnist.training.job import Splits, split_dataset


def load_samples(
    experiment: Experiment, images: Sequence[Path], *, fetch: bool = True
) -> tuple[Dataset, Splits, tuple[Path, ...]]:
    """Loads the samples and checks that all can be read.

    Args:
        experiment: The experiment.
        images: The user's images or folders of them; empty for the images of the data set.
        fetch: Whether missing data may be downloaded or generated.

    Returns:
        The data set; its samples, as the experiment splits them; the user's images, which are the test split.

    Raises:
        InputError: The data are missing or damaged, or an image cannot be read.
    """
    if not images:
        dataset = load_dataset(experiment.data, fetch=fetch)
        return dataset, split_dataset(experiment, dataset), ()
    # Imported here because only this command needs it.
    from lit_mnist.predict import predictions_of
    from lit_mnist.predict.user_images import find_images

    files = tuple(find_images(images))
    dataset = predictions_of(experiment.data.task).load_user_images(files, experiment.data, fetch=fetch)
    return dataset, Splits(dataset.train, dataset.train, dataset.test), files
