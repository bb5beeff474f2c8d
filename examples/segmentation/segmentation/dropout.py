"""Dropout that does not depend on the number of ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from lit_mnist.plugins.random_numbers import derive_seed


class DropoutKey(NamedTuple):
    """Identifies the dropout masks of a batch.

    A mask is drawn for the batch of all ranks, and each rank takes its own rows. The number of ranks therefore does not
    change the mask of a sample.

    Attributes:
        seed: The seed of the run.
        number: Index of the batch in the whole run.
        size: Samples of the batch over all ranks.
        rows: The rows of this rank.
    """

    seed: int
    number: int
    size: int
    rows: slice


class SeededDropout(nn.Module):
    """Dropout (Srivastava et al., 2014) whose masks are a function of (seed, batch, sample).

    Args:
        rate: Probability of dropping a value, from 0 to below 1.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def extra_repr(self) -> str:
        """Returns the arguments, for the printed network."""
        return f"rate={self.rate}"

    def forward(self, x: torch.Tensor, key: DropoutKey | None) -> torch.Tensor:
        """Drops values in training, and scales the others to keep the mean.

        Args:
            x: [samples of this rank, ...], floating point.
            key: Identifies the masks; not needed in evaluation.

        Raises:
            ValueError: `key` is None in training.
        """
        if not self.training or self.rate == 0:
            return x
        if key is None:
            raise ValueError("Dropout in training needs a key: call the network with (images, key).")
        generator = torch.Generator(device=x.device).manual_seed(derive_seed(key.seed, "dropout", key.number, 1))
        whole = torch.rand((key.size, *x.shape[1:]), generator=generator, dtype=torch.float32, device=x.device)
        keep = whole[key.rows] >= self.rate
        return x * keep.to(x.dtype) / (1 - self.rate)
