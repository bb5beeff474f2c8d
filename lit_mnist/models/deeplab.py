"""DeepLabV3, torchvision's networks and a small one of the same kind: a class for every pixel of a image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import segmentation

from lit_mnist.data.rng import Draw
from lit_mnist.experiment import Net
from lit_mnist.models.dropout import SeededDropout
from lit_mnist.models.memory_format import channels_last
from lit_mnist.models.small_deeplab import small_deeplab


class DeepLab(nn.Module):
    """DeepLabV3 (Chen et al.: Rethinking Atrous Convolution for Semantic Image Segmentation, 2017).

    Its weights have torchvision's names, so that weights made for torchvision's networks fit. What differs is that the
    dropout is a function of the sample, and that there is no auxiliary loss.

    Args:
        net: Which network.
        num_classes: Number of classes.
        dropout: Dropout rate after the pyramid of dilated convolutions.
        checkpoint_activations: Whether the backbone's blocks are computed again in the backward pass, instead of being
            kept.
    """

    def __init__(
        self, net: Net, num_classes: int, *, dropout: float = 0.5, checkpoint_activations: bool = False
    ) -> None:
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        if net == "deeplabv3_small":
            whole = small_deeplab(num_classes)
        else:
            make = getattr(segmentation, net)
            whole = make(weights=None, weights_backbone=None, num_classes=num_classes, aux_loss=None)
        self.backbone, self.classifier = whole.backbone, whole.classifier
        pyramid = self.classifier[0].project
        assert isinstance(pyramid[-1], nn.Dropout)
        # torch's own draws from a generator, which differs from rank to rank and from run to run.
        pyramid[-1] = nn.Identity()
        self.dropout = SeededDropout(dropout, layer=1)

    def forward(self, images: torch.Tensor, draw: Draw | None = None) -> torch.Tensor:
        """Returns logits, [batch, classes, height, width], of images [batch, 3, height, width].

        In training it needs a draw, and batch norm more than one image, on all ranks together where it is
        synchronised: a branch of the pyramid sees each as a single pixel.
        """
        x = channels_last(images)
        again = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for block in _blocks(self.backbone):
            if again and any(True for _ in block.children()):
                contexts = partial(_contexts, block)
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
            else:
                x = block(x)
        pyramid, *head = self.classifier
        x = self.dropout(pyramid(x), draw)
        for layer in head:
            x = layer(x)
        return F.interpolate(x, size=images.shape[-2:], mode="bilinear", align_corners=False)


def _blocks(backbone: nn.Module) -> Iterator[nn.Module]:
    """Yields a backbone's layers in order, a stage of residual blocks as its blocks."""
    for layer in backbone.children():
        if type(layer) is nn.Sequential:
            yield from layer
        else:
            yield layer


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Returns the contexts in which a block is computed for the first and for the second time."""
    return nullcontext(), _statistics_kept(block)


@contextmanager
def _statistics_kept(block: nn.Module) -> Iterator[None]:
    """Keeps batch norm from counting images into its running statistics that it has counted already.

    It counts them into copies: without any statistics it would keep other tensors for its backward pass than before.
    """
    norms = [layer for layer in block.modules() if isinstance(layer, nn.BatchNorm2d | nn.SyncBatchNorm)]
    kept = [dict(layer.named_buffers(recurse=False)) for layer in norms]
    for layer, buffers in zip(norms, kept, strict=True):
        for name, buffer in buffers.items():
            setattr(layer, name, buffer.clone())
    try:
        yield
    finally:
        for layer, buffers in zip(norms, kept, strict=True):
            for name, buffer in buffers.items():
                setattr(layer, name, buffer)
