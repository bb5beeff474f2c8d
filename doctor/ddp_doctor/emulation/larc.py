"""`apex.parallel.LARC`: an optimizer with a learning rate per layer (You et al., 2017, arXiv:1708.03888)."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class LARC:
    """Scales the gradient of each parameter by the ratio of its norm to that of its gradient.

    Args:
        optimizer: The optimizer that steps.
        trust_coefficient: Factor of the ratio.
        clip: Whether the ratio only lowers the learning rate of the optimizer.
        eps: Added to the norm of the gradient.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim = optimizer
        self.trust_coefficient, self.clip, self.eps = trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        """Returns what the optimizer has, such as its groups, its state and `zero_grad`."""
        if name == "optim":
            raise AttributeError(name)
        return getattr(self.optim, name)

    def step(self) -> None:
        """Steps with the scaled gradients, which contain the weight decay."""
        decays = [group.get("weight_decay", 0.0) for group in self.optim.param_groups]
        with torch.no_grad():
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._scale(parameter, float(group["lr"]), float(decay))
        for group in self.optim.param_groups:
            group["weight_decay"] = 0.0
        try:
            self.optim.step()
        finally:
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    def _scale(self, parameter: Any, lr: float, decay: float) -> None:
        weight, gradient = float(parameter.norm()), float(parameter.grad.norm())
        if weight and gradient:
            ratio = self.trust_coefficient * weight / (gradient + decay * weight + self.eps)
            if self.clip:
                ratio = min(ratio, lr) / lr if lr else 1.0
            parameter.grad.add_(parameter, alpha=decay).mul_(ratio)
