"""Batch norm: over all ranks on a CPU, which torch's SyncBatchNorm does not support (the fix of LD012), and frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.nn.functional import all_reduce

from ddp_doctor.records.recorder import digest, world

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class _OverRanks(nn.modules.batchnorm._BatchNorm):
    """Mixed into a batch norm, normalizes with the statistics of all ranks, through which gradients flow."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes each channel of [samples of this rank, channels, ...]; running statistics stay as they are."""
        if not self.training or world()[1] == 1:
            return super().forward(x)
        axes, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
        count = all_reduce(x.new_tensor([x.numel() / x.shape[1]]))
        centered = x - (all_reduce(x.sum(axes)) / count).view(shape)
        variance = all_reduce(centered.square().sum(axes)) / count
        normal = centered * torch.rsqrt(variance + self.eps).view(shape)
        return normal * self.weight.view(shape) + self.bias.view(shape) if self.affine else normal


_CLASSES: dict[Any, Any] = {kind: type(f"{kind.__name__}OverRanks", (_OverRanks, kind), {}) for kind in NORMS}


def synchronize(module: nn.Module) -> None:
    """Lets every batch norm of a module use the statistics of all ranks."""
    for part in module.modules():
        # The part stays the same object: hooks and references to it remain valid.
        part.__class__ = _CLASSES.get(type(part), type(part))


def hold(module: nn.Module) -> None:
    """Lets the running statistics of every batch norm stay as they are."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.momentum = 0.0


def frozen(module: nn.Module) -> dict[str, str]:
    """Returns a digest of the weights around each batch norm that is frozen with them, but updates its statistics."""
    found = {}
    for name, part in module.named_modules():
        if isinstance(part, NORMS) and part.training and part.track_running_stats and part.momentum != 0:
            around = list(module.get_submodule(name.rpartition(".")[0]).parameters())
            if around and not any(parameter.requires_grad for parameter in around):
                found[name] = digest([around[0], around[-1]])
    return found
