"""Augmentation of a batch in one vectorised step: each sample's change is a function of (seed, epoch, sample)."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from lit_mnist.data.order import Indices
from lit_mnist.data.randomness import uniform
from lit_mnist.experiment import DataSettings

# Pixels: a spline of this width smooths like the Gaussian of 4 pixels that Simard et al. used.
_SPLINE_SPACING = 7


def augment(images: torch.Tensor, indices: Indices, *, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    """Shifts or distorts each picture of a batch.

    Args:
        images: Float pictures, [batch, 1, height, width], 0 for the background.
        indices: The samples' numbers in the training set, int64 [batch].
        settings: Kind and strength of the augmentation.
        seed: The experiment's seed.
        epoch: The epoch, from 0.

    Returns:
        Pictures of the same shape and dtype; what is moved in from outside is background.
    """
    if settings.augment == "none":
        return images
    if settings.augment == "shift":
        return _shift(images, indices, settings.max_shift, seed, epoch)
    return _affine(images, indices, settings, seed, epoch)


def _shift(images: torch.Tensor, indices: Indices, limit: int, seed: int, epoch: int) -> torch.Tensor:
    batch, _, height, width = images.shape
    padded = F.pad(images[:, 0], (limit, limit, limit, limit))
    down, right = (
        torch.from_numpy((uniform(seed, purpose, epoch, indices) * (2 * limit + 1)).astype("int64"))
        for purpose in ("shift down", "shift right")
    )
    rows = down[:, None, None] + torch.arange(height)[None, :, None]
    columns = right[:, None, None] + torch.arange(width)[None, None, :]
    return padded[torch.arange(batch)[:, None, None], rows, columns].unsqueeze(1)


def _affine(images: torch.Tensor, indices: Indices, settings: DataSettings, seed: int, epoch: int) -> torch.Tensor:
    height, width = images.shape[-2:]

    def between(purpose: str, limit: float) -> torch.Tensor:
        return torch.from_numpy((2 * uniform(seed, purpose, epoch, indices) - 1) * limit).to(images.dtype)

    angle = between("rotation", math.radians(settings.max_rotate))
    scale = 1 / (1 + between("scale", settings.max_scale))
    # affine_grid measures in half pictures, from the output's pixels to the input's.
    right = between("shift right", 2 * settings.max_shift / width)
    down = between("shift down", 2 * settings.max_shift / height)
    cos, sin = torch.cos(angle) * scale, torch.sin(angle) * scale
    matrix = torch.stack([torch.stack([cos, -sin, right], dim=1), torch.stack([sin, cos, down], dim=1)], dim=1)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    if settings.augment == "elastic":
        grid += _distortion(images.shape, indices, settings.max_distort, seed, epoch).to(images.dtype)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def _distortion(shape: torch.Size, indices: Indices, limit: float, seed: int, epoch: int) -> torch.Tensor:
    """Returns smooth random displacements, in half pictures, [batch, height, width, 2]; none is above `limit` pixels.

    Elastic distortions made the best of convolutional networks on MNIST (Simard, Steinkraus, Platt: Best Practices for
    Convolutional Neural Networks, 2003). They smooth noise by a Gaussian; here cubic B-splines over a coarse grid of
    random numbers do (Rueckert et al.: Nonrigid Registration Using Free-Form Deformations, 1999), which takes 98
    numbers for a picture of 28 pixels and two small products.
    """
    _, _, height, width = shape
    rows, columns = _splines(height), _splines(width)
    counters = [np.arange(count) for count in (2, rows.shape[1], columns.shape[1])]
    which = np.ix_(indices, *counters)
    # Displacement, row and column of the coarse grid in one counter: each further counter costs a round of mixing.
    number = (which[1] * len(counters[1]) + which[2]) * len(counters[2]) + which[3]
    coarse = torch.from_numpy(2 * uniform(seed, "distortion", epoch, which[0], number) - 1)
    fine = torch.einsum("hr,bdrc,wc->bhwd", rows, coarse, columns)
    return fine * torch.tensor([2 * limit / width, 2 * limit / height], dtype=fine.dtype)


@cache
def _splines(size: int) -> torch.Tensor:
    """Returns the cubic B-splines that are not zero on a row of pixels, float64 [size, splines]; they add up to 1."""
    spans = max(1, round(size / _SPLINE_SPACING))
    place = (torch.arange(size, dtype=torch.float64) + 0.5) * (spans / size)
    distance = (place[:, None] - torch.arange(-1, spans + 2)[None, :]).abs()
    near = 2 / 3 - distance**2 + distance**3 / 2
    far = (2 - distance).clamp(min=0) ** 3 / 6
    return torch.where(distance < 1, near, far)
