"""The samples of a split, each read from its files, and how a DataLoader batches them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, default_collate

from lit_mnist.errors import InputError
from lit_mnist.plugins import ExactDistributedSampler
from segmentation.images import IGNORED, random_crop, read_image, read_mask, read_user_image, resize

# Images uint8 [batch, 3, size, size], classes uint8 [batch, size, size], and the indices of the samples, int64 [batch].
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
_Sample = tuple[torch.Tensor, torch.Tensor, int]


@dataclass(frozen=True)
class Split:
    """A split of a data set, as files.

    Attributes:
        images: The files of the images.
        masks: The files of their masks; empty for a user's images, which have none.
    """

    images: tuple[Path, ...]
    masks: tuple[Path, ...] = ()

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Iterable[int]) -> Split:
        """Returns some samples, in this order."""
        chosen = list(indices)
        return Split(tuple(self.images[index] for index in chosen), tuple(self.masks[index] for index in chosen))

    def read(self, index: int) -> Image.Image:
        """Returns an image in RGB and in its own size; raises InputError if it cannot be decoded."""
        return read_image(self.images[index]) if self.masks else read_user_image(self.images[index])


class SegmentationDataset(Dataset[_Sample | InputError]):
    """The samples of a split, resized or cropped at random to a square.

    Args:
        split: The files.
        num_classes: Number of classes without the border.
        size: Height and width of the samples in pixels.
        border_is_class: Whether the border of objects is one more class.
        crop_seed: The seed of random crops; None to resize the whole image.
    """

    def __init__(
        self, split: Split, num_classes: int, size: int, *, border_is_class: bool, crop_seed: int | None = None
    ) -> None:
        self.split, self.num_classes, self.size = split, num_classes, size
        self.border_is_class, self.crop_seed = border_is_class, crop_seed

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, key: int | tuple[int, int]) -> _Sample | InputError:
        """Returns an image, uint8 [3, size, size], its classes, uint8 [size, size], and its index.

        Args:
            key: The index, or the epoch and the index; see `EpochSampler`.

        Returns:
            The sample, or the error of a file that cannot be read: raised in a loader worker, it would be buried in a
            traceback. See `collate`.
        """
        epoch, index = key if isinstance(key, tuple) else (0, key)
        try:
            image, mask = self.read(index, epoch)
        except InputError as error:
            return error
        pixels = np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))
        return torch.from_numpy(pixels), torch.from_numpy(np.array(mask)), index

    def read(self, index: int, epoch: int = 0) -> tuple[Image.Image, Image.Image]:
        """Returns an image and its mask in the size of the samples; raises InputError if this fails."""
        image = self.split.read(index)
        if self.split.masks:
            mask = read_mask(self.split.masks[index], self.num_classes, border_is_class=self.border_is_class)
        else:
            mask = Image.new("L", image.size, IGNORED)
        if self.crop_seed is None:
            return resize(image, mask, self.size)
        return random_crop(image, mask, index, size=self.size, seed=self.crop_seed, epoch=epoch)


class EpochSampler(ExactDistributedSampler):
    """Also passes the epoch to the dataset, whose crops are a function of (seed, epoch, sample)."""

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:  # type: ignore[override]
        """Yields this rank's samples, batch by batch, each as (epoch, index)."""
        for indices in super().__iter__():
            yield [(self.epoch, index) for index in indices]


def collate(samples: Sequence[_Sample | InputError]) -> Batch | InputError:
    """Stacks samples, or returns the error of a sample that cannot be read."""
    failed = [sample for sample in samples if isinstance(sample, InputError)]
    return failed[0] if failed else tuple(default_collate(list(samples)))
