"""torch.nn.SyncBatchNorm on tensors of the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def install_synchronized_norm() -> None:
    """Replaces the forward pass, which needs a GPU."""
    setattr(nn.SyncBatchNorm, "forward", _forward)  # noqa: B010


class _Sum(torch.autograd.Function):
    """The sum over the ranks of a group, through which gradients flow."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        """Sums the values."""
        ctx.group, total = group, tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Sums the gradients."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Normalizes each channel of [samples of this rank, channels, ...] with the statistics of all ranks."""
    uses_batch = self.training or self.running_mean is None
    if not (self.training and dist.is_initialized() and dist.get_world_size(self.process_group) > 1):
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        means, variances = self.running_mean, self.running_var
        return nn.functional.batch_norm(
            x, means, variances, self.weight, self.bias, uses_batch, _factor(self), self.eps
        )
    axes, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    wide = x if x.dtype == torch.float64 else x.float()
    group = self.process_group if self.process_group is not None else dist.group.WORLD
    count = _sum(wide.new_tensor([x.numel() / x.shape[1]]), group).detach()
    mean = _sum(wide.sum(axes), group) / count
    centered = wide - mean.view(shape)
    variance = _sum(centered.square().sum(axes), group) / count
    if self.track_running_stats and self.running_mean is not None:
        self.num_batches_tracked.add_(1)
        factor = _factor(self)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), factor)
    normal = centered * torch.rsqrt(variance + self.eps).view(shape)
    if self.affine:
        normal = normal * self.weight.view(shape) + self.bias.view(shape)
    return normal.to(x.dtype)


def _sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total: torch.Tensor = _Sum.apply(tensor, group)
    return total


def _factor(norm: Any) -> float:
    """Returns the weight of the newest batch in the running statistics."""
    if norm.momentum is not None:
        return float(norm.momentum)
    return 1.0 / float(norm.num_batches_tracked) if norm.track_running_stats else 0.0
