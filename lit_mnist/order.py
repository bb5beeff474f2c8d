"""Which sample goes to which rank at which step, and random numbers without hidden state.

Training: the permutation of (seed, epoch) is cut into global batches, and each batch is split over the ranks in equal,
contiguous parts. The samples of a step are a function of the seed and the step alone, for any number of ranks.
Evaluation: the samples are split over the ranks in contiguous parts whose sizes differ by at most one. No part is
padded, so that no sample is counted twice.

The state of a generator must be saved, restored and split over ranks. The random numbers here have no state: the seed,
a purpose and counters (an epoch, a step, a sample) go through a 64-bit mixing function, so that any rank can compute
the number of any sample, in any order, any number of times.
"""

import zlib

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the finalizer of SplitMix64 (Steele et al.: Fast Splittable Pseudorandom Number Generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def random_bits(seed: int, purpose: str, *counters: int | npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each combination of the counters.

    Args:
        seed: The seed of the experiment, from 0 to 2**64 - 1.
        purpose: The use of the numbers; different purposes give independent numbers.
        counters: Integers or integer arrays that broadcast against each other, such as an epoch and sample indices.

    Returns:
        A uint64 array of the common shape of the counters (0-dimensional for plain integers).
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seed, dtype=np.uint64) + _GOLDEN)
        for counter in (zlib.crc32(purpose.encode()), *counters):
            state = _mix((state ^ np.asarray(counter).astype(np.uint64)) * _MIX_2 + _GOLDEN)
    return state


def uniform(seed: int, purpose: str, *counters: int | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Returns uniform numbers in [0, 1) with 53 bits; see `random_bits` for the arguments."""
    return (random_bits(seed, purpose, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derive_seed(seed: int, purpose: str, *counters: int) -> int:
    """Returns a seed from 0 to 2**63 - 1 for the generator of a library; see `random_bits` for the arguments."""
    return int(random_bits(seed, purpose, *counters) >> np.uint64(1))


def permutation(seed: int, purpose: str, count: int, *counters: int) -> Indices:
    """Returns a permutation of 0 to count - 1, int64 [count]; see `random_bits` for the other arguments."""
    keys = random_bits(seed, purpose, *counters, np.arange(count))
    return np.argsort(keys, kind="stable")


def validation_split(seed: int, count: int, val_size: int) -> tuple[Indices, Indices]:
    """Splits `count` samples at random into training and validation samples.

    Returns:
        The indices of the training samples, int64 [count - val_size], and of the validation samples, int64 [val_size],
        both ascending.
    """
    order = permutation(seed, "validation split", count)
    return np.sort(order[val_size:]), np.sort(order[:val_size])


def epoch_order(seed: int, epoch: int, count: int) -> Indices:
    """Returns the order of an epoch: a permutation of 0 to count - 1, int64 [count]."""
    return permutation(seed, "epoch order", count, epoch)


def train_rows(batch: int, batch_size: int, rank: int, world_size: int) -> slice:
    """Returns the places in an epoch's order that a rank trains on in a batch, counted from 0.

    `batch_size` counts the samples of all ranks and is a multiple of `world_size`.
    """
    share = batch_size // world_size
    first = batch * batch_size + rank * share
    return slice(first, first + share)


def evaluation_rows(count: int, rank: int, world_size: int) -> slice:
    """Returns the samples that a rank evaluates: over all ranks, each of the `count` samples exactly once."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)
