"""A registered network and a registered data set, in the project's experiment.

python train.py compare --import examples.registered_network \
    --config examples/registered_network/stripes.yaml --devices 2
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from lit_mnist import SeededDropout, register_dataset, register_network


@register_network("patches")
class Patches(nn.Module):
    """Embeds the 49 patches of 4x4 pixels of an image, mixes them twice, and averages them.

    Args:
        num_classes: Number of classes.
        dropout: Dropout rate before the last layer: the option `model.dropout`.
    """

    def __init__(self, num_classes: int, dropout: float = 0.5) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 32, kernel_size=4, stride=4)
        self.norm = nn.BatchNorm2d(32)
        self.mix = nn.Sequential(nn.Conv2d(32, 32, kernel_size=3, padding=1), nn.GELU())
        self.scale = nn.BatchNorm1d(32)
        self.dropout = SeededDropout(dropout, layer=1)
        self.head = nn.Linear(32, num_classes)

    def forward(self, images: torch.Tensor, rng: object) -> torch.Tensor:
        """Returns logits [batch, num_classes] of images [batch, 1, 28, 28]."""
        x = self.norm(self.embed(images))
        x = self.scale((x + self.mix(x)).mean(dim=(2, 3)))
        return self.head(self.dropout(x, rng))


class Stripes:
    """Images of noisy stripes. A sample is a function of its index alone.

    Args:
        samples: Number of samples.
        seed: Seed of the noise.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self.samples = samples
        self.seed = seed

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        """Returns grey values, uint8 [28, 28], and the class."""
        generator, label = np.random.default_rng([self.seed, index]), index % 3
        down, right = np.mgrid[:28, :28] + generator.integers(8)
        wave = np.sin((down, right, down + right)[label] * np.pi / 4)
        return (127 + 60 * wave + generator.normal(0, 150, (28, 28))).clip(0, 255).astype(np.uint8), label


@register_dataset("stripes", class_names=("horizontal", "vertical", "diagonal"))
def stripes() -> tuple[Stripes, Stripes]:
    """Returns the training and the test set."""
    return Stripes(3000, seed=1), Stripes(600, seed=2)
