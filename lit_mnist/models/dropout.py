"""Dropout whose masks are a function of (seed, micro-batch, layer, sample) instead of the state of a generator."""

from __future__ import annotations

import torch
from torch import nn

from lit_mnist.data.rng import Draw, derived_seed


class SeededDropout(nn.Module):
    """Dropout (Srivastava et al., 2014) that gives a sample the same mask on any number of ranks.

    Args:
        rate: Probability of dropping a value, from 0 to below 1.
        layer: A number that is different for each layer, so that the masks differ.
    """

    def __init__(self, rate: float, layer: int) -> None:
        super().__init__()
        self.rate = rate
        self.layer = layer

    def extra_repr(self) -> str:
        """Returns the arguments, for the printed network."""
        return f"rate={self.rate}, layer={self.layer}"

    def forward(self, x: torch.Tensor, draw: Draw | None) -> torch.Tensor:
        """Drops values in training, and scales the others to keep the mean.

        Args:
            x: [samples of this rank, ...], floating point.
            draw: The random numbers; not needed in evaluation.

        Raises:
            ValueError: No draw was given in training.
        """
        if not self.training or self.rate == 0:
            return x
        if draw is None:
            raise ValueError("Dropout in training needs a draw: call the network with (images, draw).")
        keep = self.kept(x, draw)
        return x * keep.to(x.dtype) / (1 - self.rate)

    def kept(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Returns a mask of the values to keep, bool of the shape of x."""
        seed = derived_seed(draw.seed, "dropout", draw.number, self.layer)
        generator = torch.Generator(device=x.device).manual_seed(seed)
        whole = torch.rand((draw.size, *x.shape[1:]), generator=generator, dtype=torch.float32, device=x.device)
        return whole[draw.rows] >= self.rate
