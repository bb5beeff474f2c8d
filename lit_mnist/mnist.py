"""MNIST and its relatives: the verified files, a data set that selects whole batches, and the augmentation.

The package contains the four official files of MNIST. Each is verified by its SHA-256 whenever it is read. The
relatives come through torchvision's classes, which download and verify them.
"""

import gzip
import hashlib
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from lit_mnist.errors import InputError
from lit_mnist.order import uniform

Name = Literal["mnist", "fashion_mnist", "kmnist", "qmnist"]
Augmentation = Literal["none", "shift", "affine"]

FILES = Path(__file__).parent / "files"
# Mean and standard deviation of the pixels of MNIST's training set, as shares of 255.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081

# The SHA-256 of each file's decoded bytes.
_SHA256 = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_TORCHVISION = {"fashion_mnist": "FashionMNIST", "kmnist": "KMNIST", "qmnist": "QMNIST"}
_MAX_SHIFT, _MAX_ROTATION, _MAX_SCALE = 2, math.radians(10), 0.1  # pixels, radians, relative


@dataclass(frozen=True, eq=False)
class Split:
    """Images, uint8 [N, height, width] with 0 for the background, and their classes, int64 [N]."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class Data:
    """A data set: its name, the SHA-256 of its content, its training split and its test split."""

    name: str
    sha256: str
    train: Split
    test: Split


def load(name: Name = "mnist", root: str | Path | None = None, *, download: bool = False) -> Data:
    """Loads and verifies a data set.

    Args:
        name: The data set.
        root: For `mnist`, a folder with the four official files in it, in its `raw` or in its `MNIST/raw`, each as
            `.gz` or decoded; by default the files of the package. For the others, the folder of torchvision's files;
            by default `~/.cache/lit_mnist`.
        download: Whether torchvision may download missing files.

    Raises:
        InputError: A file is missing, damaged, or cannot be read or downloaded.
    """
    if name != "mnist":
        return _load_by_torchvision(name, Path(root or "~/.cache/lit_mnist").expanduser(), download)
    folder = Path(root).expanduser() if root else FILES
    content = [torch.from_numpy(_read(_find(folder, each), each)) for each in _SHA256]
    images, labels, test_images, test_labels = content
    sha256 = hashlib.sha256(b"".join(bytes.fromhex(each) for each in _SHA256.values())).hexdigest()
    return Data(
        name,
        sha256,
        Split(images[16:].view(-1, 28, 28), labels[8:].long()),
        Split(test_images[16:].view(-1, 28, 28), test_labels[8:].long()),
    )


def _find(root: Path, name: str) -> Path:
    for folder in (root, root / "raw", root / "MNIST" / "raw"):
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                return path
    raise InputError(
        f"{root} has no {name}, with or without .gz, nor have its raw and MNIST/raw. Put the four official files "
        "there, or leave data.root unset to use the files of the package."
    )


def _read(path: Path, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Returns the decoded bytes of a file, with its header."""
    try:
        raw = path.read_bytes()
        content = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path} cannot be read: {error}. Replace it by MNIST's official file.") from error
    if (found := hashlib.sha256(content).hexdigest()) != _SHA256[name]:
        raise InputError(
            f"{path} is not MNIST's {name}: its SHA-256 is {found}, not {_SHA256[name]}. Replace it by the "
            "official file."
        )
    return np.frombuffer(content, np.uint8).copy()


def _load_by_torchvision(name: Name, root: Path, download: bool) -> Data:
    from torchvision import datasets  # takes a second to import, and MNIST does not need it

    kind = getattr(datasets, _TORCHVISION[name])
    try:
        parts = [kind(root, train=train, download=download) for train in (True, False)]
    except (OSError, RuntimeError) as error:
        raise InputError(f"{name} cannot be loaded from {root}: {error}") from error
    # The class is the first column of QMNIST's table of labels.
    train, test = (Split(part.data, part.targets.view(len(part.data), -1)[:, 0].contiguous().long()) for part in parts)
    digest = hashlib.sha256()
    for tensor in (train.images, train.labels, test.images, test.labels):
        digest.update(tensor.contiguous().numpy().data)
    return Data(name, digest.hexdigest(), train, test)


class Digits(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The samples of a split as normalized images, for a `DataLoader` with `collate_fn=whole_batch`.

    The augmentation of a sample is a function of (seed, epoch, sample): it does not depend on ranks or workers.

    Args:
        split: The samples.
        augment: `none`, `shift` (by up to two whole pixels) or `affine` (rotation by up to 10 degrees, size by up to a
            tenth, and shift by up to two pixels).
        seed: Seed of the augmentation.
    """

    def __init__(self, split: Split, augment: Augmentation = "none", seed: int = 0) -> None:
        self.split, self.augment, self.seed = split, augment, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the augmentation."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns an image, float32 [1, height, width], and its class, int64 []."""
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the samples of a batch: images, float32 [batch, 1, height, width], and classes, int64 [batch]."""
        rows = torch.as_tensor(indices)
        images = self.split.images.index_select(0, rows).unsqueeze(1).float()
        if self.augment != "none":
            images = _transform(images, rows.numpy(), self.augment, self.seed, self.epoch)
        return normalize(images), self.split.labels.index_select(0, rows)


def whole_batch(batch: Any) -> Any:
    """Returns a batch as it is: the `collate_fn` of a data set that selects whole batches."""
    return batch


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Normalizes float pixels of 0 to 255 to mean 0 and standard deviation 1 over MNIST, in place."""
    return images.mul_(1 / (255 * PIXEL_STD)).sub_(PIXEL_MEAN / PIXEL_STD)


def _transform(images: torch.Tensor, indices: Any, augment: Augmentation, seed: int, epoch: int) -> torch.Tensor:
    """Shifts or distorts images, float [batch, 1, height, width]; pixels from outside an image are background."""

    def numbers(purpose: str) -> torch.Tensor:
        return torch.from_numpy(uniform(seed, purpose, epoch, indices))

    batch, _, height, width = images.shape
    if augment == "shift":
        padded = F.pad(images[:, 0], (_MAX_SHIFT,) * 4)
        down, right = ((numbers(each) * (2 * _MAX_SHIFT + 1)).long() for each in ("shift down", "shift right"))
        rows = down[:, None, None] + torch.arange(height)[None, :, None]
        columns = right[:, None, None] + torch.arange(width)[None, None, :]
        return padded[torch.arange(batch)[:, None, None], rows, columns].unsqueeze(1)
    limits = {
        "rotation": _MAX_ROTATION,
        "scale": _MAX_SCALE,
        # affine_grid measures in half images.
        "shift right": 2 * _MAX_SHIFT / width,
        "shift down": 2 * _MAX_SHIFT / height,
    }
    angle, larger, right, down = ((2 * numbers(each) - 1).mul(limit).to(images.dtype) for each, limit in limits.items())
    scale = 1 / (1 + larger)
    # Maps the pixels of the output to those of the input.
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    matrix = torch.stack([torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)], dim=1)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
