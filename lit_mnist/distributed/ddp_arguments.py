"""The arguments of DistributedDataParallel, which affect rounding and are therefore the same in all engines."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

# Newer releases of torch rename the argument, and warn about the old name.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"

# DDP does not broadcast the running statistics of batch norm in each step. Synchronized batch norm keeps them equal;
# otherwise `sync_buffers` broadcasts those of rank 0 before an evaluation.
DDP_OPTIONS: dict[str, Any] = {"find_unused_parameters": False, _SYNC_BUFFERS: False}

# Devices on which `device_options` are measurably faster.
_OPTIMIZED_DEVICES = frozenset({"cuda"})


def device_options(device_type: str, accumulate: int) -> dict[str, Any]:
    """Returns the arguments that depend on the device, in addition to `DDP_OPTIONS`.

    On GPUs, gradients are views of the communication buckets, and without accumulation the graph is static. With three
    or more ranks, a static graph changes the order of the sums.

    Args:
        device_type: `cpu` or `cuda`.
        accumulate: Number of micro-batches per optimizer step.
    """
    if device_type not in _OPTIMIZED_DEVICES:
        return {}
    return {"gradient_as_bucket_view": True, "static_graph": accumulate == 1}


def accelerate_options(device_type: str, accumulate: int) -> Any:
    """Returns all arguments as Accelerate's `ddp_handler`, whose own names newer releases of torch warn about."""
    from accelerate.utils import DistributedDataParallelKwargs

    class Options(DistributedDataParallelKwargs):  # type: ignore[misc]
        def to_kwargs(self) -> dict[str, Any]:
            return {**DDP_OPTIONS, **device_options(device_type, accumulate)}

    return Options()
