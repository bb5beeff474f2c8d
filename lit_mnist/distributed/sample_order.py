"""The one place that decides which sample goes to which rank at which step.

Training: the permutation of (seed, epoch) is cut into global micro-batches, and each micro-batch is split over the
ranks in equal, contiguous parts. The samples of a step are therefore a function of the seed and the step alone, for any
number of ranks. Evaluation: the samples are split over the ranks in contiguous parts whose sizes differ by at most one.
No part is padded, so that no sample is counted twice.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lit_mnist.distributed.rng import permutation
from lit_mnist.errors import InputError

Indices = npt.NDArray[np.int64]


def validation_split(seed: int, count: int, val_size: int) -> tuple[Indices, Indices]:
    """Splits the `count` samples of a training set at random into training and validation samples.

    Returns:
        The indices of the training samples, int64 [count - val_size], and of the validation samples, int64 [val_size],
        both ascending.

    Raises:
        InputError: No sample is left for training.
    """
    if val_size >= count:
        raise InputError(
            f"data.val_size {val_size} leaves no sample for training: the training set has {count}. Lower it."
        )
    order = permutation(seed, "validation split", count)
    return np.sort(order[val_size:]), np.sort(order[:val_size])


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, count: int) -> Indices:
    """Returns the order of an epoch: a read-only permutation of 0 to count - 1, int64 [count]."""
    order = permutation(seed, "epoch order", count, epoch)
    order.setflags(write=False)
    return order


def rank_rows(batch_size: int, rank: int, world_size: int) -> slice:
    """Returns the rows of a global micro-batch that belong to a rank; `batch_size` is a multiple of `world_size`."""
    share = batch_size // world_size
    return slice(rank * share, (rank + 1) * share)


def train_indices(seed: int, epoch: int, batch: int, *, count: int, batch_size: int) -> Indices:
    """Returns the indices of the samples of one global micro-batch, int64 [batch_size].

    `batch` is the index of the micro-batch in the epoch, from 0 to count // batch_size - 1, and `count` the number of
    training samples.
    """
    return epoch_order(seed, epoch, count)[batch * batch_size : (batch + 1) * batch_size]


def evaluation_rows(count: int, rank: int, world_size: int) -> slice:
    """Returns the samples that a rank evaluates: over all ranks, each of the `count` samples exactly once."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)
