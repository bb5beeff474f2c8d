"""A private part of torch that the tour uses: torch has no public name for the timeout of a process group.

A change in torch is detected by
`test_every_way_to_initialize_is_used_with_its_timeout` in tests/examples/test_collectives.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def timeout_in_force() -> float:
    """Returns the timeout of the default group's gloo in seconds."""
    group = dist.group.WORLD
    assert group is not None
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
