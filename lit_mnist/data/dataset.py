"""The verified data set of an experiment: `load_dataset(settings).train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lit_mnist.data.classes import BORDER, class_names
from lit_mnist.data.digits.family import load_family
from lit_mnist.data.digits.mnist import load_mnist
from lit_mnist.data.digits.split import Split
from lit_mnist.data.registered_dataset import load_registered_dataset
from lit_mnist.data.segmentation.split import IGNORED, SegmentationSplit
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings
from lit_mnist.experiment.registry import DATASETS

__all__ = ["IGNORED", "AnySplit", "Dataset", "SegmentationSplit", "Split", "class_names", "load_dataset"]

AnySplit = Split | SegmentationSplit


@dataclass(frozen=True, eq=False)
class Dataset:
    """A verified data set.

    Args:
        name: `data.name` of the experiment.
        source: Where it was read from, and what was verified.
        sha256: A digest of its content, 64 hexadecimal digits.
        class_names: The names of the classes; a label is an index into them.
        train: The training split.
        test: The test split.
    """

    name: str
    source: str
    sha256: str
    class_names: tuple[str, ...]
    train: AnySplit
    test: AnySplit

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)


def load_dataset(settings: DataSettings | None = None, *, fetch: bool = True) -> Dataset:
    """Loads and verifies a data set, without starting a thread that outlives the call.

    Args:
        settings: The section `data`; by default, MNIST from the package.
        fetch: Whether missing data may be downloaded or generated.

    Raises:
        InputError: Files are missing, damaged, or cannot be read, downloaded, generated or written.
    """
    settings = settings or DataSettings()
    names = class_names(settings)
    try:
        root = Path(settings.root).expanduser() if settings.root else None
    except RuntimeError as error:
        raise InputError(f"data.root {settings.root} cannot be found: {error}") from error
    # The files mark the border without counting it as a class.
    classes_in_files = len(names) - (names[-1] == BORDER)
    loaded: tuple[str, str, AnySplit, AnySplit]
    if own := DATASETS.get(settings.name):
        loaded = load_registered_dataset(own, root)
    elif settings.name == "mnist":
        loaded = load_mnist(root)
    elif settings.name == "voc2012":
        from lit_mnist.data.segmentation.voc import load_voc2012

        loaded = load_voc2012(root, classes_in_files, download=settings.download, fetch_missing=fetch)
    elif settings.name == "shapes":
        from lit_mnist.data.segmentation.shapes import load_shapes

        loaded = load_shapes(root, classes_in_files, generate=fetch)
    else:
        loaded = load_family(settings.name, root, settings.emnist_split, len(names), fetch_missing=fetch)
    source, sha256, train, test = loaded
    return Dataset(settings.name, source, sha256, names, train, test)
