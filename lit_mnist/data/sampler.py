"""Which sample goes to which rank at which step: decided here, and nowhere else.

Training: the permutation of (seed, epoch) is cut into global micro-batches, and each micro-batch is split over the
ranks in equal, contiguous parts. What a step sees is therefore a function of the seed and the step alone, whatever the
number of ranks. Evaluation: the samples are split over the ranks in contiguous parts whose sizes differ by at most
one; nothing is padded, so that nothing is counted twice.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from lit_mnist.data.rng import permutation
from lit_mnist.errors import InputError

Indices = npt.NDArray[np.int64]


def validation_split(seed: int, count: int, val_size: int) -> tuple[Indices, Indices]:
    """Splits a training set into samples to train on and samples to validate on.

    Args:
        seed: The experiment's seed.
        count: Number of samples of the training set.
        val_size: Number of samples for validation, chosen at random.

    Returns:
        The training and the validation samples' indices, int64 [count - val_size] and int64 [val_size], ascending.

    Raises:
        InputError: Nothing would be left to train on.
    """
    if val_size >= count:
        raise InputError(
            f"data.val_size {val_size} leaves nothing to train on: the training set has {count} samples. Lower it."
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
    """Returns the samples of one global micro-batch, int64 [batch_size].

    Args:
        seed: The experiment's seed.
        epoch: The epoch, from 0.
        batch: The micro-batch of the epoch, from 0 to count // batch_size - 1.
        count: Number of training samples.
        batch_size: Samples of a micro-batch over all ranks.
    """
    return epoch_order(seed, epoch, count)[batch * batch_size : (batch + 1) * batch_size]


def evaluation_rows(count: int, rank: int, world_size: int) -> slice:
    """Returns the samples that a rank evaluates; over all ranks each of the `count` samples exactly once."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)
