"""The section `model`: the network and how its weights are moved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require

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
    """The network and how its weights are moved.

    Args:
        net: For digits `convnet` (5x5 convolutions with batch norm) or `basicnet` (3x3 convolutions with dropout); for
            scenes torchvision's `deeplabv3_resnet101`, `deeplabv3_resnet50` or `deeplabv3_mobilenet_v3_large`, or
            `deeplabv3_small`, the same built small enough for a CPU.
        weights: Where a training starts from: `none`, from random weights; `backbone`, with torchvision's weights of
            the backbone, trained on ImageNet; a run folder, with its best weights; or a file of weights: .pt or .pth,
            .safetensors, or a checkpoint.
        checkpoint_activations: Whether a deeplabv3 keeps of its backbone's blocks only what goes into each, and
            computes them once more in the backward pass: less memory for more time, and the same weights.
        dropout: Dropout rate of `basicnet` before its last layer, whose convolutional part drops half as much; or of a
            deeplabv3 after its pyramid of dilated convolutions.
        optimizer: `sgd`, `adam` or `adamw`.
        lr: Learning rate; with a schedule other than `constant`, its peak.
        lr_scale: How the rate follows the batch where `data.batch_per: rank` makes it grow with the ranks: `none`: not;
            `linear`: it is multiplied by the number of ranks; `sqrt`: by its square root.
        momentum: Momentum of `sgd`.
        nesterov: Whether `sgd` uses Nesterov's form of momentum.
        weight_decay: Weight decay: an L2 term in the gradient for `sgd` and `adam`, decoupled for `adamw`.
        schedule: Course of the learning rate over the optimizer steps of the run: `constant`, `onecycle` (linear
            up from 1/25 of the peak, linear down towards 1/1000 of it, where the step after the last would be),
            `cosine` or `polynomial` (after the warm-up, down to zero, the latter as the power 0.9 of the steps that
            are left).
        warmup: Share of the steps, from 0 to 1, over which the rate rises linearly; unset: 0.25 for `onecycle`, else 0.
        label_smoothing: Share of the target probability spread over all classes, in training only.
        views: Views of a image whose logits an evaluation takes the mean of: 1, the image alone; 5 or 9, also
            copies shifted by a pixel. Training does not see them.
        compile: Whether torch.compile makes the network's kernels: it takes from ten seconds to minutes at the start,
            needs a C++ compiler on a CPU, and rounds otherwise.
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
        require(bool(self.weights), "model.weights is empty: say none, backbone, or a file of weights.")
        require(0 <= self.dropout < 1, f"model.dropout must be at least 0 and below 1, but is {self.dropout}.")
        require(0 < self.lr < math.inf, f"model.lr must be above 0 and finite, but is {self.lr}.")
        require(0 <= self.momentum < 1, f"model.momentum must be at least 0 and below 1, but is {self.momentum}.")
        require(
            not (self.nesterov and self.optimizer == "sgd" and self.momentum == 0),
            "model.nesterov needs a model.momentum above 0: set a momentum, or model.nesterov: false.",
        )
        require(
            0 <= self.weight_decay < math.inf,
            f"model.weight_decay must be at least 0 and finite, but is {self.weight_decay}.",
        )
        require(
            self.warmup is None or 0 <= self.warmup <= 1,
            f"model.warmup must be from 0 to 1, or unset, but is {self.warmup}.",
        )
        require(
            0 <= self.label_smoothing < 1,
            f"model.label_smoothing must be at least 0 and below 1, but is {self.label_smoothing}.",
        )
