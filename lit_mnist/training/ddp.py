"""The arguments of DistributedDataParallel: the same in every engine, since the gradients' buckets shape their bits."""

from __future__ import annotations

import inspect
from typing import Any

from torch.nn.parallel import DistributedDataParallel

# torch renames the argument: the old name warns where there is a new one.
_NAMES = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _NAMES else "broadcast_buffers"


def ddp_options(*, buffers_are_equal: bool) -> dict[str, Any]:
    """Returns the keyword arguments of DistributedDataParallel.

    Args:
        buffers_are_equal: Whether the ranks' buffers are equal without sending them: so with synchronised batch norm.
    """
    return {"find_unused_parameters": False, _SYNC_BUFFERS: not buffers_are_equal}
