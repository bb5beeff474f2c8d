"""Augmentation of a batch in one vectorised step: each sample's change is a function of (seed, epoch, sample)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from lit_mnist.data.order import Indices
from lit_mnist.data.randomness import uniform
from lit_mnist.experiment import DataSettings


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
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
