"""Builds the network of an experiment from its own seed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lit_mnist.data.rng import derived_seed
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.basicnet import BasicNet
from lit_mnist.models.convnet import ConvNet
from lit_mnist.models.dropout import SeededDropout


def build_net(
    settings: ModelSettings, *, num_classes: int, seed: int, weights: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Returns the network with its initial weights, on the CPU, contiguous.

    The weights depend on the seed alone, not on what has drawn random numbers before; the global generator is left as
    it was. It computes fastest after `net.to(memory_format=torch.channels_last)`; what is saved of it is contiguous.

    Args:
        settings: Which network.
        num_classes: Number of classes.
        seed: The experiment's seed.
        weights: Weights that take the place of the random ones of their names; see `read_weights`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        net = _make(settings, num_classes)
    if settings.compile:
        assert isinstance(net, ConvNet | BasicNet)
        for layer in net.modules():
            if isinstance(layer, SeededDropout):
                # The 64-bit arithmetic of its seeds is not torch's.
                layer.kept = torch.compiler.disable(layer.kept)  # type: ignore[method-assign]
        # Without the module's call, whose hooks watch each step from outside.
        net.logits = torch.compile(net.logits)  # type: ignore[method-assign]
    if weights:
        net.load_state_dict(weights, strict=False)
    return net


def _make(settings: ModelSettings, num_classes: int) -> nn.Module:
    if settings.net == "convnet":
        return ConvNet(num_classes, views=settings.views)
    if settings.net == "basicnet":
        return BasicNet(num_classes, dropout=settings.dropout, views=settings.views)
    # It imports torchvision, which takes more than a second: only who asks for such a network waits for it.
    from lit_mnist.models.deeplab import DeepLab

    return DeepLab(
        settings.net,
        num_classes,
        dropout=settings.dropout,
        checkpoint_activations=settings.checkpoint_activations,
    )
