"""The process group of one part of the tour, and a gather to rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import Rank

SECONDS_TO_WAIT = 60.0

Value = TypeVar("Value")


@contextmanager
def joined(rank: Rank) -> Iterator[None]:
    """Creates a process group, and destroys it at the end.

    After an exception the group is not destroyed: the process exits at once, which frees the other ranks.
    """
    timeout = timedelta(seconds=SECONDS_TO_WAIT)
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size, timeout=timeout)
    yield
    dist.destroy_process_group()


def on_first(rank: Rank, value: Value) -> list[Value]:
    """Returns the values of all ranks on rank 0, as JSON gives them back, and an empty list on the others."""
    values: list[Value] = all_gather_json(value)
    return values if rank.is_first else []
