"""The data set of an experiment, verified: `dataset_of(settings).train.images`.

Digits are tensors in memory, scenes are files.
"""

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path

from lit_mnist.data.digits.family import load_family
from lit_mnist.data.digits.idx import Split
from lit_mnist.data.digits.mnist import load_mnist
from lit_mnist.data.segmentation.images import IGNORED, SegmentationSplit
from lit_mnist.errors import InputError
from lit_mnist.experiment import SEGMENTATION_NAMES, DataSettings

__all__ = ["IGNORED", "AnySplit", "Dataset", "SegmentationSplit", "Split", "class_names", "dataset_of", "load_dataset"]

AnySplit = Split | SegmentationSplit

_DIGITS = tuple(string.digits)
# In EMNIST's own order; 15 small letters that look like their capitals are merged with them.
_MERGED = (*_DIGITS, *string.ascii_uppercase, *"abdefghnqrt")
_EMNIST_CLASSES: dict[str, tuple[str, ...]] = {
    "byclass": (*_DIGITS, *string.ascii_uppercase, *string.ascii_lowercase),
    "bymerge": _MERGED,
    "balanced": _MERGED,
    "letters": tuple(string.ascii_lowercase),
    "digits": _DIGITS,
    "mnist": _DIGITS,
}
_CLASSES: dict[str, tuple[str, ...]] = {
    "mnist": _DIGITS,
    "fashion_mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "qmnist": _DIGITS,
    "voc2012": (
        *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
        *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
    ),
    "shapes": ("background", "circle", "square", "triangle", "star", "ring", "cross"),
}
_BORDER = "border"


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set: in memory, or as files of which each was read once.

    Args:
        name: `mnist`, `fashion_mnist`, `kmnist`, `qmnist`, `emnist`, `voc2012` or `shapes`.
        source: Where it was read from, and what of it was verified.
        sha256: A digest of its content, 64 hexadecimal digits.
        class_names: The classes' names; a label is an index into them.
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


def class_names(name: str, emnist_split: str = "balanced", border: str = "ignore") -> tuple[str, ...]:
    """Returns the names of a data set's classes without loading any data.

    Args:
        name: Name of the data set.
        emnist_split: Which of EMNIST's splits; without meaning for the others.
        border: `class` where the pixels of an object's border are one more class; without meaning for digits.

    Raises:
        InputError: There is no such data set or split.
    """
    names, what, known = (
        (_EMNIST_CLASSES.get(emnist_split), f"data.emnist_split {emnist_split!r}", tuple(_EMNIST_CLASSES))
        if name == "emnist"
        else (_CLASSES.get(name), f"data.name {name!r}", (*_CLASSES, "emnist"))
    )
    if names is None:
        raise InputError(f"{what} is unknown. Choose one of {', '.join(known)}.")
    return (*names, _BORDER) if name in SEGMENTATION_NAMES and border == "class" else names


def dataset_of(settings: DataSettings, *, fetch: bool = True) -> Dataset:
    """Loads what an experiment names, verified as far as that can be done.

    Args:
        settings: The section `data`.
        fetch: Whether data that are missing may be downloaded or made.

    Raises:
        InputError: The files are missing, cannot be read, fetched, made or written, or are damaged.
    """
    root = Path(settings.root) if settings.root else None
    if settings.name not in SEGMENTATION_NAMES:
        return load_dataset(settings.name, root, settings.emnist_split, fetch=fetch)
    names = class_names(settings.name, border=settings.border)
    # The border is no class of the files.
    known = len(class_names(settings.name))
    if settings.name == "voc2012":
        from lit_mnist.data.segmentation.voc import load_voc2012

        source, sha256, train, test = load_voc2012(_expanded(root), known, download=settings.download, fetch=fetch)
    else:
        from lit_mnist.data.segmentation.shapes_folder import load_shapes

        source, sha256, train, test = load_shapes(_expanded(root), known, make=fetch)
    return Dataset(settings.name, source, sha256, names, train, test)


def load_dataset(name: str, root: Path | None, emnist_split: str = "balanced", *, fetch: bool = True) -> Dataset:
    """Loads digits, verified as far as that can be done, without starting a thread that outlives the call.

    Args:
        name: `mnist`, `fashion_mnist`, `kmnist`, `qmnist` or `emnist`.
        root: Folder of the files, `~` is the home. Without one, MNIST comes from the package, and the others from
            `$XDG_CACHE_HOME/lit_mnist` or `~/.cache/lit_mnist`, into which they are downloaded when they are missing.
        emnist_split: Which of EMNIST's splits.
        fetch: Whether missing files may be downloaded.

    Raises:
        InputError: The name is unknown, or the files are missing, cannot be read, fetched or written, or are damaged.
    """
    names = class_names(name, emnist_split)
    root = _expanded(root)
    if name == "mnist":
        source, sha256, train, test = load_mnist(root)
    else:
        source, sha256, train, test = load_family(name, root, emnist_split, len(names), fetch=fetch)
    return Dataset(name, source, sha256, names, train, test)


def _expanded(root: Path | None) -> Path | None:
    """Returns a folder whose name may begin with `~`."""
    try:
        return root.expanduser() if root is not None else None
    except RuntimeError as error:
        raise InputError(f"data.root {root} cannot be found: {error}") from error
