"""Digits in memory, and the same digits loaded one by one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from lit_mnist.data.digits.augmentation import augment
from lit_mnist.data.sampler import Indices
from lit_mnist.experiment import DataSettings

# Mean and standard deviation of the pixels of MNIST's training set, as shares of 255. All data sets of digits use them.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Normalizes float pixels of 0 to 255 to mean 0 and standard deviation 1 over MNIST, in place."""
    return images.mul_(1 / (255 * PIXEL_STD)).sub_(PIXEL_MEAN / PIXEL_STD)


@dataclass(frozen=True, eq=False)
class Split:
    """The training or the test part of a data set of digits.

    Args:
        images: Grey values, uint8 [N, 28, 28], where 0 is the background.
        labels: Classes, int64 [N], from 0.
    """

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Indices) -> Split:
        """Returns some samples, in this order; by numpy, because torch might start threads before the fork."""
        if np.array_equal(indices, np.arange(len(self))):
            return self
        return Split(torch.from_numpy(self.images.numpy()[indices]), torch.from_numpy(self.labels.numpy()[indices]))

    def on(self, device: torch.device) -> Split:
        """Returns the split on a device. A copy is made at the first call, and kept for all epochs."""
        return self if self.images.device == device else _on(self, device)

    def shown(self, index: int, _settings: DataSettings) -> tuple[str, npt.NDArray[np.uint8], int]:
        """Returns a sample for display: a name, the image [28, 28], and its class."""
        return str(index), self.images[index].numpy(), int(self.labels[index])

    def samples(self, settings: DataSettings, dtype: torch.dtype, draws: tuple[int, int] | None = None) -> Samples:
        """Returns the samples for a DataLoader; see `Samples`."""
        return Samples(self, settings, dtype, draws)


# An experiment has three splits: training, validation and test.
@lru_cache(maxsize=3)
def _on(split: Split, device: torch.device) -> Split:
    return Split(split.images.to(device), split.labels.to(device))


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The samples of a split, each converted by itself with PIL and torchvision.

    Args:
        split: The samples.
        settings: Kind and strength of the augmentation.
        dtype: Floating-point type of the images. The grey values are divided in float32 first, as ToTensor does.
        draws: Seed and epoch of the augmentation; by default, images are not augmented.
    """

    def __init__(
        self, split: Split, settings: DataSettings, dtype: torch.dtype, draws: tuple[int, int] | None = None
    ) -> None:
        # torchvision takes more than a second to import.
        from torchvision import transforms

        self.split = split
        self.settings = settings
        self.dtype = dtype
        self.draws = draws
        self.to_tensor = transforms.ToTensor()
        self.normalize = transforms.Normalize((PIXEL_MEAN,), (PIXEL_STD,))

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        """Returns the image of a sample, float [1, 28, 28], and its class."""
        image = self.to_tensor(Image.fromarray(self.split.images[index].numpy())).to(self.dtype)
        if self.draws:
            seed, epoch = self.draws
            image = augment(image[None], np.array([index]), settings=self.settings, seed=seed, epoch=epoch)[0]
        return self.normalize(image), int(self.split.labels[index])

    def batch(self, images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Converts stacked samples to the images and targets of a batch: nothing is left to do."""
        return images, labels
