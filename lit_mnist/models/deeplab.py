"""DeepLabV3, which predicts a class for every pixel: the networks of torchvision, and a small one for CPUs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import segmentation
from torchvision.models.segmentation import DeepLabV3

from lit_mnist.distributed.rng import RandomKey
from lit_mnist.experiment import Net
from lit_mnist.models.layers import SeededDropout, channels_last
from lit_mnist.models.torch_internals import deeplab_parts

# The stages of the small network: inner channels of its block, stride, and dilation.
_STAGES = ((16, 1, 1), (32, 2, 1), (32, 1, 2), (32, 1, 4))
_STEM, _PYRAMID = 32, 64
_RATES = (2, 4, 6)


class DeepLab(nn.Module):
    """DeepLabV3 (Chen et al.: Rethinking Atrous Convolution for Semantic Image Segmentation, 2017).

    The keys of the state dict are those of torchvision, so that its published weights can be loaded. Two things differ:
    the dropout is a function of the sample, and there is no auxiliary loss.

    Args:
        net: The network.
        num_classes: Number of classes.
        dropout: Dropout rate after the pyramid of dilated convolutions.
        checkpoint_activations: Whether to recompute the blocks of the backbone in the backward pass instead of keeping
            their activations.
    """

    def __init__(
        self, net: Net, num_classes: int, *, dropout: float = 0.5, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        if net == "deeplabv3_small":
            deeplab = _build_small_deeplab(num_classes)
        else:
            build = getattr(segmentation, net)
            deeplab = build(weights=None, weights_backbone=None, num_classes=num_classes, aux_loss=None)
        self.backbone, self.classifier = deeplab.backbone, deeplab.classifier
        pyramid = self.classifier[0].project
        assert isinstance(pyramid[-1], nn.Dropout)
        # torch's dropout depends on the state of a generator.
        pyramid[-1] = nn.Identity()
        self.dropout = SeededDropout(dropout, layer=1)

    def forward(self, images: torch.Tensor, rng: RandomKey | None = None) -> torch.Tensor:
        """Returns logits, [batch, classes, height, width], of images [batch, 3, height, width].

        Training needs `rng`. Batch norm needs more than one image (over all ranks if it is synchronized), because a
        branch of the pyramid reduces each image to one pixel.
        """
        x = channels_last(images)
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for block in _iterate_blocks(self.backbone):
            if recompute and any(True for _ in block.children()):
                x = checkpoint(
                    block,
                    x,
                    use_reentrant=False,
                    preserve_rng_state=False,
                    context_fn=partial(_checkpoint_contexts, block),
                )
            else:
                x = block(x)
        pyramid, *head = self.classifier
        x = self.dropout(pyramid(x), rng)
        for layer in head:
            x = layer(x)
        return F.interpolate(x, size=images.shape[-2:], mode="bilinear", align_corners=False)


def _iterate_blocks(backbone: nn.Module) -> Iterator[nn.Module]:
    for layer in backbone.children():
        if type(layer) is nn.Sequential:
            yield from layer
        else:
            yield layer


def _checkpoint_contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts of the forward pass and of its recomputation."""
    return nullcontext(), _restored_statistics(block)


@contextmanager
def _restored_statistics(block: nn.Module) -> Iterator[None]:
    """Restores the running statistics of batch norm after a recomputation, which would count the images twice.

    Batch norm updates copies: without running statistics, it would save other tensors for the backward pass than in the
    first computation.
    """
    norms = [layer for layer in block.modules() if isinstance(layer, nn.BatchNorm2d | nn.SyncBatchNorm)]
    saved = [dict(layer.named_buffers(recurse=False)) for layer in norms]
    for layer, buffers in zip(norms, saved, strict=True):
        for name, buffer in buffers.items():
            setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, buffers in zip(norms, saved, strict=True):
            for name, buffer in buffers.items():
                setattr(layer, name, buffer)


def _build_small_deeplab(num_classes: int) -> DeepLabV3:
    """Builds a DeepLabV3 that trains on a CPU in minutes: a narrow ResNet with one block per stage, a narrow pyramid.

    The height and width of its features are a quarter of those of the image.
    """
    pyramid, bottleneck = deeplab_parts()
    channels = _STEM
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(3, _STEM, kernel_size=3, stride=2, padding=1, bias=False),
        bn1=nn.BatchNorm2d(_STEM),
        relu=nn.ReLU(),
    )
    for number, (inner, stride, dilation) in enumerate(_STAGES, start=1):
        outer = inner * bottleneck.expansion
        shortcut = nn.Sequential(
            nn.Conv2d(channels, outer, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(outer)
        )
        layers[f"layer{number}"] = nn.Sequential(bottleneck(channels, inner, stride, shortcut, dilation=dilation))
        channels = outer
    head = nn.Sequential(
        pyramid(channels, _RATES, _PYRAMID),
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
