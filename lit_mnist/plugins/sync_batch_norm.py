"""Batch norm over the samples of all ranks, on GPUs and on CPUs."""

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from torch import nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    _Layer = nn.BatchNorm2d  # what the class is mixed into has its attributes
else:
    _Layer = nn.Module


class PortableSyncBatchNorm(LayerSync):
    """Batch norm over the samples of all ranks, also on CPUs.

    Without it, each rank normalizes with the statistics of its own samples, so that the number of ranks changes what is
    trained. `Trainer(sync_batchnorm=True)` mends this on GPUs, and fails on CPUs:

        trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", plugins=[PortableSyncBatchNorm()])

    During a fit, output, gradients and running buffers of each `nn.BatchNorm1d`, `2d` and `3d` are those of one process
    with the whole batch. The ranks may have different numbers of samples, but each needs at least one. Leave
    `sync_batchnorm` unset: Lightning accepts one or the other.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        """Synchronizes the batch norm layers of a model, and returns it."""
        return sync_batch_norm(model, "cuda" if "nccl" in dist.get_backend_config() else "cpu")

    def revert(self, model: nn.Module) -> nn.Module:
        """Undoes `apply`."""
        return unsync_batch_norm(model)


def sync_batch_norm(net: nn.Module, device_type: str) -> nn.Module:
    """Lets every batch norm of a network use the statistics of all ranks, and returns the network.

    Args:
        net: The network.
        device_type: `cuda` for `torch.nn.SyncBatchNorm`, which replaces the layers; `cpu` to change their class in
            place. There, a layer of another class that derives from batch norm stays as it is, with a warning.
    """
    if device_type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(net)
    for name, layer in net.named_modules():
        if over_ranks := _OVER_RANKS.get(type(layer)):
            layer.__class__ = over_ranks
        elif isinstance(layer, tuple(_OVER_RANKS)) and not isinstance(layer, BatchNormOverRanks):
            warnings.warn(f"{name}, a {type(layer).__name__}, is not synchronized over the ranks.", stacklevel=2)
    return net


def unsync_batch_norm(net: nn.Module) -> nn.Module:
    """Undoes `sync_batch_norm`, and returns the network."""
    for layer in net.modules():
        for plain, over_ranks in _OVER_RANKS.items():
            if type(layer) is over_ranks:
                layer.__class__ = plain  # type: ignore[assignment]
    return TorchSyncBatchNorm().revert(net)


class BatchNormOverRanks(_Layer):
    """Mixed into a batch norm of torch, normalizes with the statistics of all ranks (Ioffe and Szegedy, 2015)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes each channel of [samples of this rank, channels, ...]; in training, every rank must take part."""
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        count, mean, variance = _global_statistics(x.detach())
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / max(count - 1, 1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        # The kernels require weights in the dtype of the statistics.
        weight = torch.ones_like(mean) if self.weight is None else self.weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if self.bias is None else self.bias.to(mean.dtype)
        return _Normalize.apply(x, weight, bias, mean, variance, count, self.eps)


class BatchNormOverRanks1d(BatchNormOverRanks, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all ranks."""


class BatchNormOverRanks2d(BatchNormOverRanks, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all ranks."""


class BatchNormOverRanks3d(BatchNormOverRanks, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over all ranks."""


_OVER_RANKS: dict[type[nn.Module], type[BatchNormOverRanks]] = {
    nn.BatchNorm1d: BatchNormOverRanks1d,
    nn.BatchNorm2d: BatchNormOverRanks2d,
    nn.BatchNorm3d: BatchNormOverRanks3d,
}


def _global_statistics(x: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Returns count, mean and biased variance of each channel over all ranks, at least in float32.

    The ranks exchange counts, means and sums of squared deviations, which are merged as in Chan, Golub and LeVeque
    (Algorithms for Computing the Sample Variance, 1983). Sums of squares would cancel where a mean is large.
    """
    channels = x.shape[1]
    count = x.numel() // channels
    start = torch.zeros(channels, dtype=torch.promote_types(x.dtype, torch.float32))
    # This kernel takes a tenth of the time of torch.var_mean; its results have the dtype of the running statistics.
    mean, variance = torch.batch_norm_update_stats(x, start, start.clone(), 0.0)
    gathered = mean.new_empty(dist.get_world_size(), 2 * channels + 1)
    mine = torch.cat([mean, variance * count, mean.new_tensor([count])])
    _wait(dist.all_gather(list(gathered), mine, async_op=True))
    means, squares, counts = gathered.split([channels, channels, 1], dim=1)
    total = int(counts.sum())
    mean = means[0] + (counts * (means - means[0])).sum(0) / total
    variance = (squares + counts * (means - mean).square()).sum(0) / total
    return total, mean, variance


def _wait(work: dist.Work) -> None:
    """Waits for a collective without sleeping: four sleeps and wakes in each step take an eighth of it on two cores."""
    while not work.is_completed():
        os.sched_yield()
    work.wait()  # raises the collective's error


class _Normalize(torch.autograd.Function):
    """Normalizes with the statistics of all ranks; the backward pass also differentiates through the statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: int,
        eps: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps = count, eps
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        # In 16 bits, the two terms of the gradient would be rounded before they cancel.
        wide_x = x.to(mean.dtype)
        # The gradients for constant statistics: those of weight and bias are the sums that the other term needs.
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad.to(mean.dtype), wide_x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.cat([grad_weight, grad_bias])
        _wait(dist.all_reduce(sums, async_op=True))
        of_x, offset = (sums.view(2, -1) * (-weight * torch.rsqrt(variance + ctx.eps) / ctx.count)).unbind()
        grad_x += F.batch_norm(wide_x, mean, variance, of_x, offset, training=False, eps=ctx.eps)
        return grad_x.to(x.dtype), grad_weight, grad_bias, None, None, None, None
