"""Process groups that ask for NCCL, and get gloo, with what NCCL supports beyond it, and SyncBatchNorm on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_doctor.emulation.devices import in_memory, replaced
from ddp_doctor.emulation.torch_internals import LIBRARY, skip_check_of_synchronized_norm
from ddp_doctor.probes.wrap import wrap_everywhere


def install_process_groups() -> None:
    """Replaces the functions that make groups, and those that gloo supports only in part."""
    for name in ("init_process_group", "new_group", "split_group", "new_subgroups", "new_subgroups_by_enumeration"):
        if original := getattr(dist, name, None):
            wrap_everywhere(name, original, _make)
    wrap_everywhere("get_backend", dist.get_backend, _backend)
    wrap_everywhere("is_nccl_available", dist.is_nccl_available, lambda original: True)
    wrap_everywhere("all_gather_into_tensor", dist.all_gather_into_tensor, _gather)
    wrap_everywhere("all_to_all", dist.all_to_all, _all_to_all)
    from torch.distributed import device_mesh

    replaced(device_mesh.DeviceMesh, "__init__", _make_mesh)
    replaced(nn.parallel.DistributedDataParallel, "__init__", _ddp)
    replaced(nn.DataParallel, "__init__", _data_parallel)
    skip_check_of_synchronized_norm()
    # Its own forward pass needs a GPU.
    setattr(nn.SyncBatchNorm, "forward", _normalize)  # noqa: B010


# The backends that the program has named, by the group.
_named: dict[int, str] = {}


def _make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    begins = original.__name__ == "init_process_group"
    position = 0 if begins else 2
    named = args[position] if len(args) > position else kwargs.get("backend")
    if "nccl" in str(named).lower() or (begins and named is None):
        if len(args) > position:
            args = (*args[:position], "gloo", *args[position + 1 :])
        else:
            kwargs["backend"] = "gloo"
    for name in ("device_id", "pg_options"):
        kwargs.pop(name, None)
    group = original(*args, **kwargs)
    _named[id(group) if isinstance(group, dist.ProcessGroup) else 0] = str(named or "nccl").lower()
    return group


def _backend(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = original(*args, **kwargs)
    if sys._getframe(2).f_code.co_filename.startswith(LIBRARY):
        return found
    group = args[0] if args else kwargs.get("group")
    named = _named.get(id(group), _named.get(0, "nccl"))
    return "nccl" if "nccl" in named else found


def _gather(original: Callable[..., Any], output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return original(output.view(-1), tensor.contiguous().view(-1), *args, **kwargs)


def _all_to_all(
    original: Callable[..., Any], outputs: Any, inputs: Any, group: Any = None, async_op: bool = False
) -> Any:
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    own = dist.get_rank(group)
    works = [dist.isend(tensor, ranks[number], group) for number, tensor in enumerate(inputs) if number != own]
    works += [dist.irecv(tensor, ranks[number], group) for number, tensor in enumerate(outputs) if number != own]
    outputs[own].copy_(inputs[own])
    for work in works:
        if work is not None:
            work.wait()
    return None


def _make_mesh(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        original(self, str(in_memory(device_type)), *args, **kwargs)

    return make


def _ddp(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        original(self, module, None, None, *args, **kwargs)

    return make


def _data_parallel(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        # One device: the batch is not scattered.
        original(self, module, [0], None, dim)
        self.device_ids = []

    return make


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
        return _sum(gradients[0], ctx.group), None


def _normalize(self: Any, x: torch.Tensor) -> torch.Tensor:
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
