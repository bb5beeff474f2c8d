"""A DeepLabV3 that a CPU trains in minutes: a narrow ResNet of one block per stage, and a narrow pyramid."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn
from torchvision.models.resnet import Bottleneck
from torchvision.models.segmentation import DeepLabV3
from torchvision.models.segmentation.deeplabv3 import ASPP

# Of each stage: the inner channels of its block, the stride, and the dilation.
_STAGES = ((16, 1, 1), (32, 2, 1), (32, 1, 2), (32, 1, 4))
_STEM, _PYRAMID = 32, 64
_RATES = (2, 4, 6)


def small_deeplab(num_classes: int) -> DeepLabV3:
    """Returns the network, with random weights; its features have a quarter of the image's height and width."""
    channels = _STEM
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, _STEM, kernel_size=3, stride=2, padding=1, bias=False),
        bn1=nn.BatchNorm2d(_STEM),
        relu=nn.ReLU(),
    )
    for number, (inner, stride, dilation) in enumerate(_STAGES, start=1):
        outer = inner * Bottleneck.expansion
        shortcut = nn.Sequential(
            nn.Conv2d(channels, outer, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(outer)
        )
        layers[f"layer{number}"] = nn.Sequential(Bottleneck(channels, inner, stride, shortcut, dilation=dilation))
        channels = outer
    head = nn.Sequential(
        ASPP(channels, _RATES, _PYRAMID),
        nn.Conv2d(_PYRAMID, _PYRAMID, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(_PYRAMID),
        nn.ReLU(),
        nn.Conv2d(_PYRAMID, num_classes, kernel_size=1),
    )
    net = DeepLabV3(nn.Sequential(layers), head)
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d) and layer.bias is None:
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return net
