"""The network of a checkpoint with what an export needs: its normalization, class names and input."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lit_mnist.data.classes import class_names
from lit_mnist.data.digits.mnist import load_mnist
from lit_mnist.data.digits.split import PIXEL_MEAN, PIXEL_STD
from lit_mnist.predict.trained import load_net

# The images on which an export is compared with the network.
_COMPARED = 64


class PixelNet(nn.Module):
    """A network with its normalization.

    Args:
        net: The network.
        mean: Mean of each channel, for pixels of 0 to 1.
        std: Standard deviation of each channel.
    """

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self, net: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("scale", 1 / (255 * torch.tensor(std).view(1, -1, 1, 1)))
        self.register_buffer("shift", torch.tensor(mean).view(1, -1, 1, 1) / torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Returns logits of pixels from 0 to 255, float32 [batch, channels, height, width]."""
        logits: torch.Tensor = self.net(pixels * self.scale - self.shift, None)
        return logits


@dataclass(frozen=True)
class Exported:
    """A network that is exported.

    Attributes:
        net: The network with its normalization, float32, in evaluation mode, on the CPU.
        pixels: Images on which the export is compared, float32 [batch, channels, height, width] from 0 to 255.
        metadata: What a program must know, as texts.
    """

    net: PixelNet
    pixels: torch.Tensor
    metadata: dict[str, str]


def load_exported(path: Path) -> Exported:
    """Reads the network of a checkpoint.

    Raises:
        InputError: The checkpoint is damaged, or its network is not registered.
    """
    net, experiment, num_classes = load_net(path)
    mean, std = (PIXEL_MEAN,), (PIXEL_STD,)
    pixels = load_mnist(None)[3].images[:_COMPARED].unsqueeze(1).float()
    metadata = {
        "network": experiment.model.net,
        "classes": json.dumps(class_names(experiment.data)[:num_classes]),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
        "input": f"float32 [batch, {pixels.shape[1]}, {pixels.shape[2]}, {pixels.shape[3]}], pixels from 0 to 255",
    }
    return Exported(PixelNet(net.float().eval(), mean, std).eval(), pixels, metadata)
