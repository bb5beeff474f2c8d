"""Builds the network of an experiment from its own seed."""

from __future__ import annotations

import torch
from torch import nn

from lit_mnist.data.randomness import derived_seed
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.basicnet import BasicNet
from lit_mnist.models.convnet import ConvNet
from lit_mnist.models.dropout import SeededDropout


def build_net(settings: ModelSettings, *, num_classes: int, seed: int) -> nn.Module:
    """Returns the network with its initial weights, on the CPU, in channels-last format.

    The weights depend on the seed alone, not on what has drawn random numbers before; the global generator is left as
    it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derived_seed(seed, "weights"))
        net: BasicNet | ConvNet
        if settings.net == "basicnet":
            net = BasicNet(num_classes, dropout=settings.dropout, views=settings.views)
        else:
            net = ConvNet(num_classes, views=settings.views)
    if settings.compile:
        for layer in net.modules():
            if isinstance(layer, SeededDropout):
                # The 64-bit arithmetic of its seeds is not torch's.
                layer.kept = torch.compiler.disable(layer.kept)  # type: ignore[method-assign]
        # Without the module's call, whose hooks watch each step from outside.
        net.logits = torch.compile(net.logits)  # type: ignore[method-assign]
    return net.to(memory_format=torch.channels_last)
