"""Batch norm over the samples of all ranks, on GPUs and CPUs.

`torch.nn.SyncBatchNorm` refuses tensors on the CPU. This one computes the same function there: the ranks exchange their
statistics in the forward pass, and two sums per channel in the backward pass. The result is that of `nn.BatchNorm2d` on
the ranks' batches put together: output, gradients and running buffers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from lit_mnist.distributed.peer_exchange import PeerExchange


class PortableSyncBatchNorm(nn.BatchNorm2d):
    """Batch norm (Ioffe and Szegedy, 2015) over all ranks' batches; parameters and buffers as `nn.BatchNorm2d`.

    Attributes:
        exchange: This rank's connections to the others, shared by all layers of a network.
    """

    exchange: PeerExchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalises each channel.

        Args:
            x: [batch of this rank, channels, height, width]; in training every rank must take part, with a batch of
                any size above 0.

        Returns:
            A tensor of the same shape and dtype.
        """
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        count, mean, variance = _global_statistics(x.detach(), self.exchange)
        self._update_running(count, mean, variance)
        return _Normalise.apply(x, self.weight, self.bias, mean, variance, count, self.eps, self.exchange)

    @torch.no_grad()
    def _update_running(self, count: int, mean: torch.Tensor, variance: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1, 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


def _global_statistics(x: torch.Tensor, exchange: PeerExchange) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Returns count, mean and biased variance of each channel over all ranks.

    Each rank sends its count, mean and sum of squared deviations; these are combined pairwise in rank order (Chan,
    Golub and LeVeque, 1983), which neither cancels large means nor depends on which rank does it.
    """
    channels = x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    # The fused kernel takes a tenth of the time of `torch.var_mean`. Its running statistics, which a momentum of 0
    # leaves alone, are only given for their type: without them those of 16-bit images would have 16 bits.
    unused = torch.zeros(channels, dtype=dtype), torch.ones(channels, dtype=dtype)
    mean, variance = torch.batch_norm_update_stats(x, *unused, 0.0)
    count = x.numel() // channels
    gathered = exchange.all_gather(torch.cat([mean, variance * count, mean.new_tensor([count])]))

    counts = [round(n) for n in gathered[:, -1].tolist()]
    total, mean, squares = counts[0], gathered[0, :channels], gathered[0, channels : 2 * channels]
    for other, row in zip(counts[1:], gathered[1:], strict=True):
        merged = total + other
        delta = row[:channels] - mean
        mean = mean + delta * (other / merged)
        squares = squares + row[channels : 2 * channels] + delta * delta * (total * other / merged)
        total = merged
    return total, mean, squares / total


class _Normalise(torch.autograd.Function):
    """Normalises with statistics of all ranks; its backward pass accounts for every sample's part in them."""

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
        exchange: PeerExchange,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps, ctx.exchange = count, eps, exchange
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        # What the fused kernel gives for constant statistics is the sums that the statistics' own part needs.
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        sums = ctx.exchange.all_reduce(torch.cat([grad_weight, grad_bias])).view(2, -1)
        scale = torch.rsqrt(variance + ctx.eps)
        slope = weight * scale * scale * sums[0] / ctx.count
        offset = weight * scale * sums[1] / ctx.count - slope * mean
        # The two terms cancel where the gradient follows the input or the mean is large: 16 bits hold their difference,
        # but not each of them.
        wide = torch.promote_types(x.dtype, torch.float32)
        of_grad = _affine(grad.to(wide), weight * scale, -offset)
        of_x = _affine(x.to(wide), -slope, torch.zeros_like(slope))
        return of_grad.add_(of_x).to(x.dtype), grad_weight, grad_bias, None, None, None, None, None


def _affine(x: torch.Tensor, slope: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Returns slope * x + offset for each channel, in the one pass of the fused kernel."""
    # Not by torch.nn.functional, which refuses an epsilon of 0 in some releases, 2.11 among them.
    mean, variance = torch.zeros_like(slope), torch.ones_like(slope)
    return torch.batch_norm(x, slope, offset, mean, variance, False, 0.0, 0.0, False)


def sync_batch_norm(net: nn.Module, device_type: str, timeout: float = 120.0) -> nn.Module:
    """Replaces every batch norm of a network by one over all ranks, sharing parameters and buffers; returns it.

    Args:
        net: The network.
        device_type: `cuda`, for torch's own synchronised batch norm, or `cpu`, which that one refuses.
        timeout: Seconds that a rank waits for the others on a CPU; on GPUs it is the process group's.
    """
    if device_type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        return converted
    _replace(net, nn.BatchNorm2d, PortableSyncBatchNorm)
    exchange = PeerExchange(timeout)
    for layer in net.modules():
        if isinstance(layer, PortableSyncBatchNorm):
            layer.exchange = exchange
    return net


def share_buffers(net: nn.Module) -> None:
    """Gives every rank the buffers of rank 0; every rank must call it.

    Where batch norm is not synchronised, each rank's running statistics come from its own samples: an evaluation that
    is to be one of one network needs those of one rank, and rank 0's are the ones that are saved.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)


def unsync_batch_norm(net: nn.Module) -> nn.Module:
    """Undoes `sync_batch_norm` on a CPU, but for the connections, which close with the layers; returns the network."""
    return _replace(net, PortableSyncBatchNorm, nn.BatchNorm2d)


def _replace(net: nn.Module, old: type[nn.BatchNorm2d], new: type[nn.BatchNorm2d]) -> nn.Module:
    for name, child in net.named_children():
        if type(child) is old:
            twin = new(child.num_features, child.eps, child.momentum)
            twin.weight, twin.bias = child.weight, child.bias
            twin.running_mean, twin.running_var = child.running_mean, child.running_var
            twin.num_batches_tracked = child.num_batches_tracked
            setattr(net, name, twin.train(child.training))
        else:
            _replace(child, old, new)
    return net
