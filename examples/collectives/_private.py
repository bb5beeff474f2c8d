"""The place where the tour reaches into torch's private parts.

torch has no public name for the time-out that a process group's gloo really uses. A change of torch is noticed by
`test_every_way_to_initialise_is_used_with_its_time_out` in tests/examples/test_collectives.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def timeout_in_force() -> float:
    """Returns the seconds after which the default group's gloo gives a collective up, as gloo itself tells them."""
    group = dist.group.WORLD
    assert group is not None
    return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
