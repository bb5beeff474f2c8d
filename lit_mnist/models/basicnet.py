"""BasicNet: the network of the PyTorch examples' MNIST script, two convolutions and two linear layers with dropout."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from lit_mnist.distributed.rng import RandomKey
from lit_mnist.models.layers import SeededDropout, channels_last, mean_over_views


class BasicNet(nn.Module):
    """Two 3x3 convolutions of 32 and 64 channels, max pooling, dropout, 128 hidden units, dropout, one linear layer.

    Args:
        num_classes: Number of classes.
        dropout: Dropout rate before the last layer; the first dropout has half of it.
        views: Number of views of an image whose logits an evaluation averages: 1, 5 or 9.
    """

    def __init__(self, num_classes: int = 10, dropout: float = 0.5, views: int = 1) -> None:
        super().__init__()
        self.views = views
        self.conv1 = nn.Conv2d(1, 32, kernel_size=3)
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.dropout1 = SeededDropout(dropout / 2, layer=1)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.dropout2 = SeededDropout(dropout, layer=2)
        self.fc2 = nn.Linear(128, num_classes)

    def forward(self, images: torch.Tensor, rng: RandomKey | None = None) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of images [batch, 1, 28, 28]; training needs `rng`."""
        if self.training:
            return self.logits(images, rng)
        return mean_over_views(lambda view: self.logits(view, None), images, self.views)

    def logits(self, images: torch.Tensor, rng: RandomKey | None) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of one view of each image."""
        x = F.relu(self.conv1(channels_last(images)))
        # Pooling before the ReLU is the same function with the same gradient, and the ReLU has a quarter of the work.
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = self.dropout1(x, rng).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)), rng)
        return self.fc2(x)
