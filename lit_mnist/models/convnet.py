"""ConvNet: the network of the classic DDP demo, two convolutions with batch norm and one linear layer."""

from __future__ import annotations

import torch
from torch import nn

from lit_mnist.distributed.rng import RandomKey
from lit_mnist.models.layers import channels_last, mean_over_views


class ConvNet(nn.Module):
    """Two 5x5 convolutions of 16 and 32 channels, each with batch norm, max pooling and ReLU, then one linear layer.

    29,034 parameters for 10 classes.

    Args:
        num_classes: Number of classes.
        views: Number of views of an image whose logits an evaluation averages: 1, 5 or 9.
    """

    def __init__(self, num_classes: int = 10, views: int = 1) -> None:
        super().__init__()
        self.views = views
        self.layer1 = self._block(1, 16)
        self.layer2 = self._block(16, 32)
        self.fc = nn.Linear(32 * 7 * 7, num_classes)

    @staticmethod
    def _block(channels_in: int, channels_out: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(channels_in, channels_out, kernel_size=5, padding=2),
            nn.BatchNorm2d(channels_out),
            # Pooling before the ReLU is the same function with the same gradient; the ReLU has a quarter of the work.
            nn.MaxPool2d(2),
            nn.ReLU(),
        )

    def forward(self, images: torch.Tensor, rng: RandomKey | None = None) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of images [batch, 1, 28, 28]; uses no random numbers."""
        return self.logits(images) if self.training else mean_over_views(self.logits, images, self.views)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of one view of each image."""
        return self.fc(self.layer2(self.layer1(channels_last(images))).flatten(1))
