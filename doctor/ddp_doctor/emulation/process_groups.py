"""Process groups that ask for NCCL, and get gloo, with what NCCL supports beyond it, and SyncBatchNorm on it."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh

from ddp_doctor.emulation.tensors import in_memory
from ddp_doctor.probes.modules import normalize_over_ranks
from ddp_doctor.probes.wrap import wrap, wrap_everywhere


def install_process_groups() -> None:
    """Replaces the functions that make groups, and those that gloo supports only in part."""
    for name in ("init_process_group", "new_group", "split_group", "new_subgroups", "new_subgroups_by_enumeration"):
        wrap_everywhere(name, getattr(dist, name), _make)
    wrap_everywhere("is_nccl_available", dist.is_nccl_available, lambda original: True)
    wrap_everywhere("all_gather_into_tensor", dist.all_gather_into_tensor, _gather)
    wrap(device_mesh.DeviceMesh, "__init__", _make_mesh)
    ddp: Any = nn.parallel.DistributedDataParallel
    wrap(ddp, "__init__", _wrap_model)
    # The parameters are in the memory of the CPU.
    ddp._passing_sync_batchnorm_handle = lambda self, module: None
    wrap(nn.DataParallel, "__init__", _wrap_alone)
    wrap(nn.SyncBatchNorm, "forward", lambda _, norm, x: normalize_over_ranks(norm, x, norm.process_group))


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
    return original(*args, **kwargs)


def _gather(original: Callable[..., Any], output: Any, tensor: Any, *args: Any, **kwargs: Any) -> Any:
    return original(output.view(-1), tensor.contiguous().view(-1), *args, **kwargs)


def _make_mesh(original: Callable[..., Any], self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
    original(self, str(in_memory(device_type)), *args, **kwargs)


def _wrap_model(original: Callable[..., Any], self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    for name in ("device_ids", "output_device"):
        kwargs.pop(name, None)
    original(self, module, None, None, *args[2:], **kwargs)


def _wrap_alone(original: Callable[..., Any], self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
    # One device: the batch is not scattered.
    original(self, module, [0])
    self.device_ids = []
