"""The parts that the networks share: seeded dropout, the memory format, and the mean over views of an image."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lit_mnist.distributed.rng import RandomKey, derive_seed

# Shifts down and right in pixels: the image itself, its four neighbors, and the four diagonal ones.
_SHIFTS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


class SeededDropout(nn.Module):
    """Dropout (Srivastava et al., 2014) whose masks are a function of (seed, micro-batch, layer, sample).

    It has no generator state, and a sample has the same mask on any number of ranks. In evaluation, it
    returns its input:

        dropout = SeededDropout(0.5, layer=1).eval()
        dropout(torch.ones(4, 16), None)  # float32 [4, 16], unchanged

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

    def forward(self, x: torch.Tensor, rng: RandomKey | None) -> torch.Tensor:
        """Drops values in training, and scales the others to keep the mean.

        Args:
            x: [samples of this rank, ...], floating point.
            rng: Identifies the random numbers; not needed in evaluation.

        Raises:
            ValueError: `rng` is None in training.
        """
        if not self.training or self.rate == 0:
            return x
        if rng is None:
            raise ValueError("Dropout in training needs `rng`: call the network with (images, rng).")
        keep = self.kept(x, rng)
        return x * keep.to(x.dtype) / (1 - self.rate)

    def kept(self, x: torch.Tensor, rng: RandomKey) -> torch.Tensor:
        """Returns a mask of the values to keep, bool of the shape of x."""
        seed = derive_seed(rng.seed, "dropout", rng.number, self.layer)
        generator = torch.Generator(device=x.device).manual_seed(seed)
        whole = torch.rand((rng.size, *x.shape[1:]), generator=generator, dtype=torch.float32, device=x.device)
        return whole[rng.rows] >= self.rate


def channels_last(images: torch.Tensor) -> torch.Tensor:
    """Returns images, [batch, channels, height, width], in the memory format in which convolutions are fastest.

    Images of one channel have the same memory layout in both formats, and torch would choose the slower one for all
    layers. Their strides are set without a copy.
    """
    if images.shape[1] == 1:
        return images.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def mean_over_views(logits: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, views: int) -> torch.Tensor:
    """Returns the mean of the logits of shifted views of each image.

    airbench does this on CIFAR-10, with other views and weights (Jordan: 94% on CIFAR-10 in 3.29 Seconds, 2024).

    Args:
        logits: The network: from images to logits, [batch, classes].
        images: [batch, channels, height, width]; a shift repeats the pixels of the edge.
        views: 1 (the images alone), 5 or 9.

    Returns:
        [batch, classes], with several views at least in float32.
    """
    if views == 1:
        return logits(images)
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    total: torch.Tensor | None = None
    for down, right in _SHIFTS[:views]:
        view_logits = logits(padded[..., 1 - down : 1 - down + height, 1 - right : 1 - right + width])
        view_logits = view_logits.to(torch.promote_types(view_logits.dtype, torch.float32))
        total = view_logits if total is None else total + view_logits
    assert total is not None
    return total / views
