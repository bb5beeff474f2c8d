"""The undocumented parts of torchvision that the networks use."""

from __future__ import annotations

from typing import Any


def deeplab_parts() -> tuple[Any, Any]:
    """Returns torchvision's classes `ASPP`, the pyramid of a DeepLabV3, and `Bottleneck`, the block of a ResNet."""
    from torchvision.models.resnet import Bottleneck
    from torchvision.models.segmentation.deeplabv3 import ASPP

    return ASPP, Bottleneck
