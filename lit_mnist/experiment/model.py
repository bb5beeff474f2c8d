"""The section `model`: the network, its optimizer and its learning rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require
from lit_mnist.run.bounds import check_bounds

Net = Literal[
    "convnet",
    "basicnet",
    "deeplabv3_resnet101",
    "deeplabv3_resnet50",
    "deeplabv3_mobilenet_v3_large",
    "deeplabv3_small",
]


@dataclass(frozen=True)
class ModelSettings:
    """The network, its optimizer and its learning rate schedule.

    Args:
        net: For digits: `convnet` (5x5 convolutions with batch norm) or `basicnet` (3x3 convolutions with dropout). For
            segmentation images: torchvision's `deeplabv3_resnet101`, `deeplabv3_resnet50` or
            `deeplabv3_mobilenet_v3_large`, or `deeplabv3_small`, which is small enough for a CPU.
        weights: Initial weights: `none` (random), `backbone` (torchvision's backbone, trained on ImageNet), a run
            folder (its best weights), or a file of weights (.pt, .pth, .safetensors, or a checkpoint).
        checkpoint_activations: Whether to recompute the activations of a deeplabv3's backbone in the backward pass. It
            uses less memory and more time, and trains the same weights.
        dropout: Dropout rate before the last layer of `basicnet` (its convolutions drop half as much), or after the
            pyramid of dilated convolutions of a deeplabv3.
        optimizer: `sgd`, `adam` or `adamw`.
        lr: Learning rate; the peak if the schedule is not `constant`. With the default of 0.1, `onecycle` and `sgd`, a
            run of fewer than 240 steps has a lower peak, which is logged.
        lr_scale: Scales the learning rate if `data.batch_per: rank` multiplies the batch by the number of ranks:
            `none`, `linear` (by the number of ranks) or `sqrt` (by its square root).
        momentum: Momentum of `sgd`.
        nesterov: Whether `sgd` uses Nesterov momentum.
        weight_decay: Weight decay: an L2 penalty for `sgd` and `adam`, decoupled for `adamw`.
        schedule: Learning rate schedule over the optimizer steps of the run: `constant`, `onecycle` (linear from 1/25
            of the peak up to the peak, then linear down to 1/1000 of it one step after the last), or, after the
            warm-up, `cosine` or `polynomial` (power 0.9) down to zero.
        warmup: Share of the steps, from 0 to 1, in which the learning rate rises linearly. Unset: 0.25 for `onecycle`,
            otherwise 0.
        label_smoothing: Share of the target probability that is spread over all classes, in training only.
        views: Copies of an image whose logits are averaged in evaluation: 1 (the image itself), 5 or 9 (also copies
            shifted by one pixel). It does not affect training.
        compile: Whether to compile the network with torch.compile. It takes ten seconds to minutes at the start,
            requires a C++ compiler on a CPU, and rounds differently.
    """

    net: Net = "convnet"
    weights: str = "none"
    checkpoint_activations: bool = False
    dropout: float = 0.5
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = 0.1
    lr_scale: Literal["none", "linear", "sqrt"] = "none"
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 0.0
    schedule: Literal["constant", "onecycle", "cosine", "polynomial"] = "onecycle"
    warmup: float | None = None
    label_smoothing: float = 0.0
    views: Literal[1, 5, 9] = 1
    compile: bool = False

    def __post_init__(self) -> None:
        require(bool(self.weights), "model.weights is empty: set none, backbone, or a file of weights.")
        require(0 < self.lr < math.inf, f"model.lr must be above 0 and finite, but is {self.lr}.")
        require(
            0 <= self.weight_decay < math.inf,
            f"model.weight_decay must be at least 0 and finite, but is {self.weight_decay}.",
        )
        check_bounds("model", self, "warmup", low=0, high=1)
        for name in ("dropout", "momentum", "label_smoothing"):
            value = getattr(self, name)
            require(0 <= value < 1, f"model.{name} must be at least 0 and below 1, but is {value}.")
        require(
            not (self.nesterov and self.optimizer == "sgd" and self.momentum == 0),
            "model.nesterov needs a model.momentum above 0: set a momentum, or model.nesterov: false.",
        )
