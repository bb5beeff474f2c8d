"""Digits in memory, their augmentation, and the same digits loaded one by one.

The augmentation of a sample is a function of (seed, epoch, sample). Its random numbers are computed on the CPU, for a
whole epoch at once if needed. The images stay on their device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image

from lit_mnist.distributed.rng import uniform
from lit_mnist.distributed.sample_order import Indices
from lit_mnist.experiment import DataSettings

# Mean and standard deviation of the pixels of MNIST's training set, as shares of 255. All data sets of digits use them.
PIXEL_MEAN, PIXEL_STD = 0.1307, 0.3081
# Height and width, in pixels, of the images of all data sets of digits.
_SIDE = 28


def normalize(images: torch.Tensor) -> torch.Tensor:
    """Normalizes float pixels of 0 to 255 to mean 0 and standard deviation 1 over MNIST, in place."""
    return images.mul_(1 / (255 * PIXEL_STD)).sub_(PIXEL_MEAN / PIXEL_STD)


@dataclass(frozen=True, eq=False)
class Split:
    """A split of a data set of digits.

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

    def to(self, device: torch.device) -> Split:
        """Returns the split on a device. The copy is cached for all epochs."""
        return self if self.images.device == device else _copy_to(self, device)

    def display_sample(self, index: int, _settings: DataSettings) -> tuple[str, npt.NDArray[np.uint8], int]:
        """Returns a sample for display: a name, the image, uint8 [28, 28], and its class."""
        return str(index), self.images[index].numpy(), int(self.labels[index])

    def samples(self, settings: DataSettings, dtype: torch.dtype, draws: tuple[int, int] | None = None) -> Samples:
        """Returns the samples for a DataLoader; see `Samples`."""
        return Samples(self, settings, dtype, draws)


# An experiment has three splits: training, validation and test.
@lru_cache(maxsize=3)
def _copy_to(split: Split, device: torch.device) -> Split:
    return Split(split.images.to(device), split.labels.to(device))


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """The samples of a split for a DataLoader, converted one by one with PIL and torchvision.

    `draws` is the seed and the epoch of the augmentation, None for none.
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
        """Returns the stacked samples unchanged; see `SegmentationSamples.batch`."""
        return images, labels


def augment(images: torch.Tensor, indices: Indices, *, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    """Shifts or distorts each image of a batch; see `parameters` and `transform` for the arguments."""
    return transform(images, parameters(indices, settings=settings, seed=seed, epoch=epoch), settings)


def parameters(indices: Indices, *, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    """Returns the random parameters of the augmentation of each sample, whose indices are int64 [samples].

    Returns:
        A column for each sample, on the CPU. For `shift`: pixels down and right from the top left position, int64
        [2, samples]. For `affine`: the angle in radians, the change of the scale, and the shift right and down in half
        images, float64 [4, samples]. Without augmentation: float64 [0, samples].
    """

    def numbers(purpose: str) -> npt.NDArray[np.float64]:
        return uniform(seed, purpose, epoch, indices)

    if settings.augment == "shift":
        shifts = [numbers(purpose) * (2 * settings.max_shift + 1) for purpose in ("shift down", "shift right")]
        return torch.from_numpy(np.stack(shifts).astype("int64"))
    # affine_grid measures in half images.
    shift = 2 * settings.max_shift / _SIDE
    rotation = math.radians(settings.max_rotate)
    limits = {"rotation": rotation, "scale": settings.max_scale, "shift right": shift, "shift down": shift}
    used = limits if settings.augment == "affine" else {}
    columns = [(2 * numbers(purpose) - 1) * limit for purpose, limit in used.items()]
    return torch.from_numpy(np.array(columns).reshape(len(used), len(indices)))


def transform(images: torch.Tensor, numbers: torch.Tensor, settings: DataSettings) -> torch.Tensor:
    """Shifts or distorts the images of a batch, float [batch, 1, height, width], with 0 for the background.

    `numbers` are the `parameters` of their samples, on the same device. Pixels from outside an image are background.
    """
    if settings.augment == "none":
        return images
    if settings.augment == "shift":
        return _shift(images, numbers, settings.max_shift)
    return _affine(images, numbers)


def _shift(images: torch.Tensor, numbers: torch.Tensor, limit: int) -> torch.Tensor:
    batch, _, height, width = images.shape
    padded = F.pad(images[:, 0], (limit, limit, limit, limit))
    down, right = numbers

    def arange(count: int) -> torch.Tensor:
        return torch.arange(count, device=images.device)

    rows = down[:, None, None] + arange(height)[None, :, None]
    columns = right[:, None, None] + arange(width)[None, None, :]
    return padded[arange(batch)[:, None, None], rows, columns].unsqueeze(1)


def _affine(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    angle, larger, right, down = numbers.to(images.dtype)
    scale = 1 / (1 + larger)
    # Maps the pixels of the output to those of the input.
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    matrix = torch.stack([torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)], dim=1)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
