"""Lists of names and numbers in messages."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns names as `a, b and c`, or `a, b, c and 4 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def per_rank(values: Sequence[object]) -> str:
    """Returns a value of each rank, as `3 on rank 0, 2 on rank 1`."""
    return ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
