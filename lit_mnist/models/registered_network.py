"""Builds a registered network, and checks that it trains the same on any number of ranks.

The checks run a few images through the network on one thread of the CPU, once in a process. They run no backward pass:
the ranks may be forked from this process, and autograd's threads would not survive the fork.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from lit_mnist.distributed.rng import RandomKey
from lit_mnist.distributed.threads import single_thread
from lit_mnist.errors import InputError
from lit_mnist.experiment.registry import Registered
from lit_mnist.models.layers import SeededDropout

_BATCH = 4
_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_SYNCHRONIZED = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_USE_DROPOUT = "use lit_mnist.SeededDropout(rate, layer=1), called with (x, rng)"


def build_registered_network(registered: Registered, num_classes: int, dropout: float, views: int) -> nn.Module:
    """Returns a registered network, whose initial weights come from torch's generator.

    Raises:
        InputError: It is not a network that this project can train; the message says what to change.
    """
    _check_once(registered, num_classes, dropout, views)
    return _build(registered, num_classes, dropout, views)


def _build(registered: Registered, num_classes: int, dropout: float, views: int) -> nn.Module:
    # The checks of a checkpoint build networks on the meta device, which a user's code need not support.
    with torch.device("cpu"):
        net = registered.call(num_classes, dropout=dropout, views=views)
    if not isinstance(net, nn.Module):
        raise InputError(
            f"{registered.title}: {registered.path} returns a {type(net).__name__}: return a torch.nn.Module."
        )
    return net


@cache
def _check_once(registered: Registered, num_classes: int, dropout: float, views: int) -> None:
    """Checks a network. Of an error the cache keeps nothing.

    Raises:
        InputError: The network is rejected; the message says what to change.
    """

    def build() -> nn.Module:
        torch.manual_seed(1)
        return _build(registered, num_classes, dropout, views)

    with single_thread(), torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
        net, other = build(), build()
        title = registered.title
        _check_layers(title, net)
        _check_signature(title, net)
        _check_weights(title, net, other)
        images = torch.randn(_BATCH, 1, 28, 28, generator=torch.Generator().manual_seed(2))
        key = RandomKey(seed=3, number=5, size=_BATCH, rows=torch.arange(_BATCH))

        initial = {name: tensor.clone() for name, tensor in net.state_dict().items()}

        def forward(net: nn.Module, rows: slice = slice(None)) -> torch.Tensor:
            # Buffers may change in each pass of a training, as those of batch norm do.
            net.load_state_dict(initial)
            rng = key._replace(rows=key.rows[rows]) if net.training else None
            found = registered.guard("its forward(images, rng)", lambda: net(images[rows], rng))
            _check_output(title, found, (len(images[rows]), num_classes))
            return torch.as_tensor(found)

        with _unchanged_generators(title):
            logits = forward(net.train())
        _check_gradients(title, net, logits)
        _check_repeats(title, logits, [forward(net), forward(other.train())])
        for trains in (False, True):
            net.train(trains)
            _check_samples(title, net, forward)


def _check_layers(title: str, net: nn.Module) -> None:
    """Rejects layers that draw from torch's generator, and batch norms that are not synchronized."""
    numbers: dict[int, str] = {}
    for name, layer in net.named_modules():
        kind = type(layer)
        if isinstance(layer, _DROPOUT) and layer.p > 0:
            raise InputError(
                f"{title}: its layer {name or kind.__name__} is an nn.{kind.__name__}, whose masks depend on the rank: "
                f"{_USE_DROPOUT}."
            )
        if isinstance(layer, _BATCH_NORM) and kind not in _SYNCHRONIZED:
            raise InputError(
                f"{title}: its layer {name or kind.__name__} is a {kind.__name__}: use nn.BatchNorm1d, 2d or 3d, which "
                "the project synchronizes over the ranks."
            )
        if isinstance(layer, SeededDropout):
            if layer.layer in numbers:
                raise InputError(
                    f"{title}: its layers {numbers[layer.layer]} and {name} are both SeededDropout(layer="
                    f"{layer.layer}), with the same masks: give each layer its own number."
                )
            numbers[layer.layer] = name


def _check_signature(title: str, net: nn.Module) -> None:
    try:
        inspect.signature(net.forward).bind("images", "rng")
    except TypeError as error:
        raise InputError(f"{title}: its network must have forward(self, images, rng), but {error}.") from error


def _check_weights(title: str, net: nn.Module, other: nn.Module) -> None:
    """Rejects a network without trained parameters, and initial weights that are not a function of the seed."""
    if not any(parameter.requires_grad for parameter in net.parameters()):
        raise InputError(f"{title}: its network has no parameters to train: keep its layers as attributes.")
    for (name, first), second in zip(net.state_dict().items(), other.state_dict().values(), strict=False):
        if not isinstance(first, torch.Tensor) or nn.parameter.is_lazy(first):
            raise InputError(f"{title}: its weight {name} is not a tensor of a fixed shape: use no lazy layers.")
        if not _equal(first, second):
            raise InputError(
                f"{title}: its initial {name} is not a function of the seed: initialize it with torch.nn.init, or draw "
                "it from torch's generator."
            )


def _check_output(title: str, logits: Any, wanted: tuple[int, ...]) -> None:
    if not isinstance(logits, torch.Tensor):
        raise InputError(f"{title}: its forward returns a {type(logits).__name__}: return the logits, one tensor.")
    if tuple(logits.shape) != wanted or not logits.is_floating_point():
        raise InputError(
            f"{title}: its forward returns {logits.dtype} {list(logits.shape)} for {wanted[0]} images and {wanted[1]} "
            f"classes: return floating-point logits of the shape {list(wanted)}."
        )
    if not bool(torch.isfinite(logits).all()):
        raise InputError(f"{title}: its forward returns infinite values or NaN for random images.")


def _check_gradients(title: str, net: nn.Module, logits: torch.Tensor) -> None:
    """Rejects parameters that the logits do not depend on: DDP would wait for their gradients."""
    reached, nodes, seen = set(), [logits.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(parameter := getattr(node, "variable", None), torch.Tensor):
            reached.add(id(parameter))
        nodes += [following for following, _ in node.next_functions]
    for name, parameter in net.named_parameters():
        if parameter.requires_grad and id(parameter) not in reached:
            raise InputError(
                f"{title}: its parameter {name} gets no gradient: use it in forward, remove it, or set "
                "requires_grad=False."
            )


def _check_repeats(title: str, logits: torch.Tensor, repeated: list[torch.Tensor]) -> None:
    """Rejects a forward with a state outside of the weights: its logits differ when it is repeated."""
    if not all(torch.equal(again, logits) for again in repeated):
        raise InputError(
            f"{title}: its forward returns different logits for the same images, rng and weights: it must not use "
            "generators or states of its own."
        )


def _check_samples(title: str, net: nn.Module, forward: Callable[[nn.Module, slice], torch.Tensor]) -> None:
    """Rejects logits that depend on the other images of a batch, other than by batch norm."""
    for layer in net.modules():
        if isinstance(layer, _SYNCHRONIZED):
            layer.eval()
    with torch.no_grad():
        whole = forward(net, slice(None))
        parts = torch.cat([forward(net, slice(0, 3)), forward(net, slice(3, 4))])
    if not torch.allclose(whole, parts, rtol=1e-3, atol=1e-4):
        raise InputError(
            f"{title}: its logits of an image depend on which other images are in the batch, so that several ranks "
            "would not compute what one computes: compute nothing over the batch except by nn.BatchNorm, and draw "
            "random numbers by lit_mnist.SeededDropout."
        )


@contextmanager
def _unchanged_generators(title: str) -> Iterator[None]:
    """Rejects a body that draws from a global generator, and restores those of Python and NumPy."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)
    try:
        yield
        drawn = {
            "torch": not torch.equal(torch.get_rng_state(), before[0]),
            "Python": random.getstate() != before[1],
            "NumPy": str(np.random.get_state(legacy=True)) != str(before[2]),
        }
    finally:
        random.setstate(before[1])
        np.random.set_state(before[2])
    if names := [name for name, holds in drawn.items() if holds]:
        raise InputError(
            f"{title}: its forward draws from {names[0]}'s global generator, whose numbers depend on the rank: "
            f"{_USE_DROPOUT}."
        )


def _equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.nan_to_num(), second.nan_to_num())
