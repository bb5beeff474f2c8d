"""Synchronized batch norm on GPUs and CPUs.

`torch.nn.SyncBatchNorm` does not accept tensors on the CPU. The classes here compute the same function there: the ranks
exchange their statistics in the forward pass, and two sums per channel in the backward pass. Output, gradients and
running buffers are those of torch's batch norm on the concatenated batches of all ranks.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from lit_mnist.distributed.peer_exchange import PeerExchange
from lit_mnist.distributed.torch_internals import affine_gradients, channel_statistics, check_input, weighted_sum

# What the class is mixed into has the attributes of any batch norm.
if TYPE_CHECKING:
    _Layer = nn.BatchNorm2d
else:
    _Layer = nn.Module


class BatchNormOverRanks(_Layer):
    """Mixed into a batch norm layer of torch, normalizes with the statistics of all ranks (Ioffe and Szegedy, 2015).

    Attributes:
        exchange: This rank's connections to the others, shared by all layers of a network.
    """

    exchange: PeerExchange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes each channel.

        Args:
            x: [batch of this rank, channels, ...], on the CPU. In training, every rank must take part, with at least
                one sample.

        Returns:
            A tensor of the same shape and dtype.

        Raises:
            ValueError: The input has another number of dimensions than the layer normalizes.
        """
        if not self.training or not dist.is_initialized() or dist.get_world_size() == 1:
            return super().forward(x)
        check_input(self, x)
        count, mean, variance = _global_statistics(x.detach(), self.exchange)
        self._update_running(count, mean, variance)
        # The kernel requires weights in the dtype of the statistics, which have at least 32 bits.
        weight = torch.ones_like(mean) if self.weight is None else self.weight.to(mean.dtype)
        bias = torch.zeros_like(mean) if self.bias is None else self.bias.to(mean.dtype)
        return _Normalize.apply(x, weight, bias, mean, variance, count, self.eps, self.exchange)

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

    Each rank sends its count, mean and sum of squared deviations, which are combined pairwise in the order of the ranks
    (Chan, Golub and LeVeque, 1983). This does not cancel large means, and gives the same result on every rank.
    """
    channels = x.shape[1]
    mean, variance = channel_statistics(x)
    count = x.numel() // channels
    # NumPy's operations on few values take a third of the time of torch's.
    gathered = exchange.all_gather(torch.cat([mean, variance * count, mean.new_full((1,), count)])).numpy()

    counts = [round(n) for n in gathered[:, -1].tolist()]
    total, means, squares = counts[0], gathered[0, :channels], gathered[0, channels : 2 * channels]
    for other, row in zip(counts[1:], gathered[1:], strict=True):
        merged = total + other
        delta = row[:channels] - means
        means = means + delta * (other / merged)
        squares = squares + row[channels : 2 * channels] + delta * delta * (total * other / merged)
        total = merged
    return total, torch.from_numpy(means), torch.from_numpy(squares / total)


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
        exchange: PeerExchange,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps, ctx.exchange = count, eps, exchange
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, variance = ctx.saved_tensors
        # The gradient through the statistics needs the sums that are the gradients for constant statistics.
        grad_weight, grad_bias = affine_gradients(grad, x, weight, mean, variance, ctx.eps)
        sums = ctx.exchange.all_reduce(torch.cat([grad_weight, grad_bias])).view(2, -1)
        scale = torch.rsqrt(variance + ctx.eps)
        of_grad = weight * scale
        of_x = -(of_grad * scale * sums[0] / ctx.count)
        offset = -(of_grad * sums[1] / ctx.count + of_x * mean)
        # The two terms cancel if the gradient follows the input or the mean is large: 16 bits can represent their
        # difference, but not each term.
        grad_input = weighted_sum(grad, x, of_grad, of_x, offset)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


class BatchNormOverRanks1d(BatchNormOverRanks, nn.BatchNorm1d):
    """`nn.BatchNorm1d` over all ranks."""


class BatchNormOverRanks2d(BatchNormOverRanks, nn.BatchNorm2d):
    """`nn.BatchNorm2d` over all ranks."""


class BatchNormOverRanks3d(BatchNormOverRanks, nn.BatchNorm3d):
    """`nn.BatchNorm3d` over all ranks."""


OVER_RANKS: dict[type[nn.Module], type[BatchNormOverRanks]] = {
    nn.BatchNorm1d: BatchNormOverRanks1d,
    nn.BatchNorm2d: BatchNormOverRanks2d,
    nn.BatchNorm3d: BatchNormOverRanks3d,
}


def sync_batch_norm(net: nn.Module, device_type: str, timeout: float = 120.0) -> nn.Module:
    """Lets every batch norm of a network use the statistics of all ranks, and returns the network.

    Args:
        net: The network.
        device_type: `cuda` for `torch.nn.SyncBatchNorm`, `cpu` for the classes here.
        timeout: Seconds that a rank waits for the others on a CPU. GPUs use the timeout of the process group.
    """
    if device_type == "cuda":
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        return converted
    _exclude_from_compilation()
    exchange = PeerExchange(timeout)
    for layer in net.modules():
        if over_ranks := OVER_RANKS.get(type(layer)):
            # The layer stays the same object: hooks and references to it remain valid.
            layer.__class__ = over_ranks
            cast(BatchNormOverRanks, layer).exchange = exchange
    return net


@cache
def _exclude_from_compilation() -> None:
    """Lets torch's compiler break the graph at each layer, since it cannot trace the exchange.

    As a decorator, `torch.compiler.disable` would import the compiler together with this module, which takes a second.
    """
    BatchNormOverRanks.forward = torch.compiler.disable(BatchNormOverRanks.forward)  # type: ignore[method-assign]


def unsync_batch_norm(net: nn.Module) -> nn.Module:
    """Undoes `sync_batch_norm` on a CPU and returns the network. The connections close when no layer has them."""
    plain: dict[type[nn.Module], type[nn.Module]] = {over_ranks: kind for kind, over_ranks in OVER_RANKS.items()}
    for layer in net.modules():
        if isinstance(layer, BatchNormOverRanks):
            del layer.exchange
            layer.__class__ = plain[type(layer)]  # type: ignore[assignment]
    return net
