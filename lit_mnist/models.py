"""The networks, and dropout without hidden state.

Every network maps images, [batch, 1, 28, 28], to logits, [batch, classes], in at least float32: a loss of 16-bit logits
would be rounded, and only some libraries convert them.
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lit_mnist.order import derive_seed

# Shifts down and right in pixels: the image itself, its four neighbors, and the four diagonal ones.
_SHIFTS = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1), (-1, -1), (-1, 1), (1, -1), (1, 1))


class ConvNet(nn.Module):
    """Two 5x5 convolutions of 16 and 32 channels, each with batch norm, max pooling and ReLU, then one linear layer.

    It is the network of the classic DDP demo; 29,034 parameters for 10 classes.

    Args:
        num_classes: Number of classes.
        views: Number of shifted views of an image whose logits an evaluation averages: 1, 5 or 9.
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

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of images, [batch, 1, 28, 28]."""
        return _mean_over_views(self._logits, images, 1 if self.training else self.views)

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        return _at_least_float32(self.fc(self.layer2(self.layer1(_channels_last(images))).flatten(1)))


class BasicNet(nn.Module):
    """Two 3x3 convolutions of 32 and 64 channels, max pooling, dropout, 128 hidden units, dropout, one linear layer.

    It is the network of the PyTorch examples' MNIST script.

    Args:
        num_classes: Number of classes.
        dropout: Dropout rate before the last layer; the first dropout has half of it.
        views: Number of shifted views of an image whose logits an evaluation averages: 1, 5 or 9.
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

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, num_classes], of images, [batch, 1, 28, 28]."""
        return _mean_over_views(self._logits, images, 1 if self.training else self.views)

    def _logits(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(_channels_last(images)))
        # Pooling before the ReLU is the same function with the same gradient; the ReLU has a quarter of the work.
        x = F.relu(F.max_pool2d(self.conv2(x), 2))
        x = F.relu(self.fc1(self.dropout1(x).flatten(1)))
        return _at_least_float32(self.fc2(self.dropout2(x)))


class SeededDropout(nn.Module):
    """Dropout (Srivastava et al., 2014) whose masks are a function of (seed, micro-batch, layer, sample).

    It has no generator state, and a sample has the same mask on any number of ranks: each rank draws the mask of the
    global micro-batch, of which all ranks have equal parts, and takes its own rows. `seed_dropout` sets the key before
    each forward pass in training.

    Args:
        rate: Probability of dropping a value, from 0 to below 1.
        layer: A number that is different for each layer, so that the masks differ.

    Attributes:
        key: The seed of the experiment and the number of the micro-batch in the run.
    """

    def __init__(self, rate: float, layer: int) -> None:
        super().__init__()
        self.rate, self.layer = rate, layer
        self.key: tuple[int, int] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Drops values of [batch, ...] in training, and scales the others to keep the mean.

        Raises:
            RuntimeError: `seed_dropout` was not called.
        """
        if not self.training or self.rate == 0:
            return x
        if self.key is None:
            raise RuntimeError("Call seed_dropout(net, seed, number) before a forward pass in training.")
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        seed, number = self.key
        generator = torch.Generator(device=x.device).manual_seed(derive_seed(seed, "dropout", number, self.layer))
        whole = torch.rand((world_size, *x.shape), generator=generator, dtype=torch.float32, device=x.device)
        return x * (whole[rank] >= self.rate).to(x.dtype) / (1 - self.rate)


def seed_dropout(net: nn.Module, seed: int, number: int) -> None:
    """Sets the key of each `SeededDropout` of a network for the next forward pass in training.

    Args:
        net: The network, also without such layers.
        seed: The seed of the experiment.
        number: Index of the micro-batch in the whole run.
    """
    for layer in net.modules():
        if isinstance(layer, SeededDropout):
            layer.key = seed, number


def make_net(
    net: Literal["convnet", "basicnet"] = "convnet",
    *,
    num_classes: int = 10,
    dropout: float = 0.5,
    views: int = 1,
    seed: int = 0,
) -> nn.Module:
    """Returns a network whose initial weights are a function of the seed alone; global generators do not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        return ConvNet(num_classes, views) if net == "convnet" else BasicNet(num_classes, dropout, views)


def _at_least_float32(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _channels_last(images: torch.Tensor) -> torch.Tensor:
    """Returns images, [batch, channels, height, width], in the memory format in which convolutions are fastest.

    Images of one channel have the same memory layout in both formats, and torch would choose the slower one for all
    layers. Their strides are set without a copy.
    """
    if images.shape[1] == 1:
        return images.squeeze(1).unsqueeze(-1).permute(0, 3, 1, 2)
    return images.contiguous(memory_format=torch.channels_last)


def _mean_over_views(logits: Callable[[torch.Tensor], torch.Tensor], images: torch.Tensor, views: int) -> torch.Tensor:
    """Returns the mean of the logits of shifted views of each image, whose edges are repeated.

    airbench does this on CIFAR-10, with other views and weights (Jordan: 94% on CIFAR-10 in 3.29 Seconds, 2024).
    """
    if views == 1:
        return logits(images)
    height, width = images.shape[-2:]
    padded = F.pad(images, (1, 1, 1, 1), mode="replicate")
    shifted = [padded[..., 1 - down : 1 - down + height, 1 - right : 1 - right + width] for down, right in _SHIFTS]
    return torch.stack([logits(view) for view in shifted[:views]]).mean(dim=0)
