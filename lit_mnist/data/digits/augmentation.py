"""Augmentation of a batch in one vectorized step: the change of a sample is a function of (seed, epoch, sample).

The random numbers are computed on the CPU, for a whole epoch at once if needed. The images change on their own device.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from lit_mnist.data.rng import uniform
from lit_mnist.data.sampler import Indices
from lit_mnist.experiment import DataSettings

# Height and width, in pixels, of the images of all data sets of digits.
_SIDE = 28


def augment(images: torch.Tensor, indices: Indices, *, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    """Shifts or distorts each image of a batch.

    Args:
        images: Float images, [batch, 1, height, width], with 0 for the background.
        indices: Indices of the samples in the training set, int64 [batch].
        settings: Kind and strength of the augmentation.
        seed: The seed of the experiment.
        epoch: The epoch, from 0.

    Returns:
        Images of the same shape and dtype; what comes in from outside is background.
    """
    return transform(images, parameters(indices, settings=settings, seed=seed, epoch=epoch), settings)


def parameters(indices: Indices, *, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    """Returns the random numbers of each sample's change, for any number of samples.

    They are computed on the CPU, and are therefore the same for every device.

    Args:
        indices: Indices of the samples in the training set, int64 [samples].
        settings: Kind and strength of the augmentation.
        seed: The seed of the experiment.
        epoch: The epoch, from 0.

    Returns:
        A column for each sample. For `shift`: pixels down and right from the top left position, int64 [2, samples].
        For `affine`: the angle in radians, the change of the scale, and the shift right and down in half images,
        float64 [4, samples]. Without augmentation: float64 [0, samples].
    """

    def numbers(purpose: str) -> npt.NDArray[np.float64]:
        return uniform(seed, purpose, epoch, indices)

    if settings.augment == "shift":
        places = [numbers(purpose) * (2 * settings.max_shift + 1) for purpose in ("shift down", "shift right")]
        return torch.from_numpy(np.stack(places).astype("int64"))
    # affine_grid measures in half images.
    shift = 2 * settings.max_shift / _SIDE
    limits = {
        "rotation": math.radians(settings.max_rotate),
        "scale": settings.max_scale,
        "shift right": shift,
        "shift down": shift,
    }
    used = limits if settings.augment == "affine" else {}
    columns = [(2 * numbers(purpose) - 1) * limit for purpose, limit in used.items()]
    return torch.from_numpy(np.array(columns).reshape(len(used), len(indices)))


def transform(images: torch.Tensor, numbers: torch.Tensor, settings: DataSettings) -> torch.Tensor:
    """Returns the images of a batch, [batch, 1, height, width], shifted or distorted.

    Args:
        images: Float images, with 0 for the background.
        numbers: The `parameters` of their samples, on the same device.
        settings: Kind and strength of the augmentation.
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
    # From the pixels of the output to those of the input.
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    matrix = torch.stack([torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)], dim=1)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
