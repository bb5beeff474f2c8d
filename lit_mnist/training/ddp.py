"""The arguments of DistributedDataParallel: the same in every engine, since the gradients' buckets shape their bits."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

# torch renames the argument: the old name warns where there is a new one.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


# Batch norm's running statistics are not sent around at each step: synchronised, they are equal already; else rank 0's
# count, which it saves, and `share_buffers` gives them to all before an evaluation.
DDP_OPTIONS: dict[str, Any] = {"find_unused_parameters": False, _SYNC_BUFFERS: False}
