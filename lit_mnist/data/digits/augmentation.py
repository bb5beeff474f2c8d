"""Augmentation of a batch in one vectorised step: each sample's change is a function of (seed, epoch, sample).

The random numbers are the host's, for a whole epoch if one likes; the images change on the device that they lie on.
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

# Pixels of a image's height and width, in all data sets of digits.
_SIDE = 28


def augment(images: torch.Tensor, indices: Indices, *, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    """Shifts or distorts each image of a batch.

    Args:
        images: Float images, [batch, 1, height, width], 0 for the background.
        indices: The samples' numbers in the training set, int64 [batch].
        settings: Kind and strength of the augmentation.
        seed: The experiment's seed.
        epoch: The epoch, from 0.

    Returns:
        Images of the same shape and dtype; what is moved in from outside is background.
    """
    return changed(images, changes(indices, settings=settings, seed=seed, epoch=epoch), settings)


def changes(indices: Indices, *, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    """Returns the random numbers that say how each sample changes, for as many samples at once as one likes.

    They are computed on the host, so that they are the same for whatever device computes with them.

    Args:
        indices: The samples' numbers in the training set, int64 [samples].
        settings: Kind and strength of the augmentation.
        seed: The experiment's seed.
        epoch: The epoch, from 0.

    Returns:
        A column for each sample. Shifts: how many pixels down and right of the farthest place up and left, int64
        [2, samples]; distortions: the angle in radians, what is added to a scale of 1, and the way right and down in
        half images, float64 [4, samples]; of no augmentation float64 [0, samples].
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
    wanted = limits if settings.augment == "affine" else {}
    columns = [(2 * numbers(purpose) - 1) * limit for purpose, limit in wanted.items()]
    return torch.from_numpy(np.array(columns).reshape(len(wanted), len(indices)))


def changed(images: torch.Tensor, numbers: torch.Tensor, settings: DataSettings) -> torch.Tensor:
    """Returns the images of a batch, [batch, 1, height, width], shifted or distorted.

    Args:
        images: Float images, 0 for the background.
        numbers: What `changes` gives for their samples, on the same device.
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

    def counted(count: int) -> torch.Tensor:
        return torch.arange(count, device=images.device)

    rows = down[:, None, None] + counted(height)[None, :, None]
    columns = right[:, None, None] + counted(width)[None, None, :]
    return padded[counted(batch)[:, None, None], rows, columns].unsqueeze(1)


def _affine(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    angle, larger, right, down = numbers.to(images.dtype)
    scale = 1 / (1 + larger)
    # From the output's pixels to the input's.
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    matrix = torch.stack([torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)], dim=1)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
