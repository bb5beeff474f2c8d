"""The same buffers on all ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def sync_buffers(net: nn.Module) -> None:
    """Broadcasts the buffers of rank 0, which are the ones that are saved; every rank must call it.

    Without synchronized batch norm, each rank has the running statistics of its own samples, but an evaluation must use
    the same statistics on all ranks.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        for buffer in net.buffers():
            dist.broadcast(buffer, src=0)
