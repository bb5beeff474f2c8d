"""The arguments of DistributedDataParallel: the same in every engine, since the gradients' buckets shape their bits."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

# torch renames the argument: the old name warns where there is a new one.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


# Batch norm's running statistics are not sent around at each step: synchronised, they are equal already; else rank 0's
# count, which it saves, and `broadcast_buffers` gives them to all before an evaluation.
DDP_OPTIONS: dict[str, Any] = {"find_unused_parameters": False, _SYNC_BUFFERS: False}

# Where a copy of each gradient and the search of each step's graph are worth sparing: on a CPU it is within the noise.
_SPARING = frozenset({"cuda"})


def device_options(device_type: str, accumulate: int) -> dict[str, Any]:
    """Returns the arguments beside `DDP_OPTIONS` for a device.

    Gradients are views of the buckets in which they travel. And where every backward pass shares its gradients, DDP is
    told that all of them run through the same graph; from three ranks on the sums then have another order.

    Args:
        device_type: `cpu` or `cuda`.
        accumulate: Micro-batches of an optimizer step: all but the last share nothing.
    """
    if device_type not in _SPARING:
        return {}
    return {"gradient_as_bucket_view": True, "static_graph": accumulate == 1}


def accelerate_options(device_type: str, accumulate: int) -> Any:
    """Returns all arguments for Accelerate's `ddp_handler`, which by itself gives an old name that torch warns of.

    Args:
        device_type: As of `device_options`.
        accumulate: See there.
    """
    from accelerate.utils import DistributedDataParallelKwargs

    class Options(DistributedDataParallelKwargs):  # type: ignore[misc]
        def to_kwargs(self) -> dict[str, Any]:
            return {**DDP_OPTIONS, **device_options(device_type, accumulate)}

    return Options()
