"""Numbers that are equal if and, but for chance, only if tensors are equal, at the cost of reading them once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

MOST_GROUPS = 256
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def is_whole(tensor: torch.Tensor) -> bool:
    """Returns whether this rank holds the tensor itself, not a shard of it (a DTensor) or a tensor without values."""
    plain = type(tensor) in {torch.Tensor, torch.nn.Parameter} and not tensor.is_sparse and not tensor.is_quantized
    return plain and tensor.device.type != "meta"


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns an int64 tensor of shape (groups,) on the device of the tensors: sums of the bits of neighbours.

    Args:
        tensors: At least one tensor; all on one device.
    """
    sums = torch.stack([_sum(tensor) for tensor in tensors])
    size = group_size(len(sums))
    if size > 1:
        # Odd factors: two tensors that were exchanged give another sum.
        places = torch.arange(len(sums), device=sums.device)
        groups = torch.zeros(-(-len(sums) // size), dtype=torch.int64, device=sums.device)
        return groups.index_add(0, places // size, sums * (2 * places + 1))
    return sums


def group_size(tensors: int) -> int:
    """Returns how many neighbours share a digest."""
    return max(1, -(-tensors // MOST_GROUPS))


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    values = torch.view_as_real(values) if values.is_complex() else values
    return values.view(_SAME_SIZE[values.element_size()]).sum(dtype=torch.int64)
