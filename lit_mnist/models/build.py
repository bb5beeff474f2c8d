"""Builds the network of an experiment from the seed of the experiment."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from lit_mnist.distributed.rng import derive_seed
from lit_mnist.errors import InputError
from lit_mnist.experiment.model import ModelSettings
from lit_mnist.models.basicnet import BasicNet
from lit_mnist.models.convnet import ConvNet
from lit_mnist.models.layers import SeededDropout


def build_net(
    settings: ModelSettings, *, num_classes: int, seed: int, weights: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Builds the network with its initial weights, contiguous and on the CPU.

    The weights are a function of the seed alone; the state of the global generator does not change. The network is
    fastest after `net.to(memory_format=torch.channels_last)`.

    Args:
        settings: The section `model`.
        num_classes: Number of classes.
        seed: The seed of the experiment.
        weights: A state dict whose entries replace initial weights; see `read_weights`.

    Raises:
        InputError: A registered network is not one that this project can train, or the network cannot be compiled.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        net = _create_net(settings, num_classes)
    if settings.compile:
        if not isinstance(net, ConvNet | BasicNet):
            raise InputError(f"model.compile does not apply to model.net {settings.net}: remove it.")
        for layer in net.modules():
            if isinstance(layer, SeededDropout):
                # It computes its 64-bit seeds with numpy.
                layer.kept = torch.compiler.disable(layer.kept)  # type: ignore[method-assign]
        # Compiles `logits` instead of the module, whose hooks must run outside of the graph.
        net.logits = torch.compile(net.logits)  # type: ignore[method-assign]
    if weights:
        net.load_state_dict(weights, strict=False)
    return net


def _create_net(settings: ModelSettings, num_classes: int) -> nn.Module:
    if settings.net == "convnet":
        return ConvNet(num_classes, views=settings.views)
    if settings.net == "basicnet":
        return BasicNet(num_classes, dropout=settings.dropout, views=settings.views)
    # Only runs of a user's network import this.
    from lit_mnist.experiment.registry import NETWORKS
    from lit_mnist.models.registered_network import build_registered_network

    if user := NETWORKS.get(settings.net):
        return build_registered_network(user, num_classes, settings.dropout, settings.views)
    # torchvision takes more than a second to import.
    from lit_mnist.models.deeplab import DeepLab

    return DeepLab(
        settings.net,
        num_classes,
        dropout=settings.dropout,
        checkpoint_activations=settings.checkpoint_activations,
    )
