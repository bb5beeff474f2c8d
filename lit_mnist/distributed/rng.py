"""Random numbers without hidden state: each is a function of the seed and its purpose.

The state of a generator must be saved, restored and split between ranks. These numbers have no state: the seed, a
purpose, and counters (an epoch, a step, a sample) go through a 64-bit mixing function, so that any rank can compute the
number of any sample, in any order, any number of times.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Returns the finalizer of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def random_bits(seed: int, purpose: str, *counters: int | npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each combination of the counters.

    Args:
        seed: The seed of the experiment.
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


def permutation(seed: int, purpose: str, count: int, *counters: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of 0 to count - 1, int64 [count]; see `random_bits` for the arguments."""
    keys = random_bits(seed, purpose, *counters, np.arange(count))
    return np.argsort(keys, kind="stable")


class RandomKey(NamedTuple):
    """Identifies the random numbers that a rank uses inside the network for one micro-batch.

    A dropout mask is drawn for the whole micro-batch, and each rank takes its own rows. The number of ranks therefore
    does not change the mask of a sample.

    Attributes:
        seed: The seed of the experiment.
        number: Index of the micro-batch in the whole run.
        size: Samples of the micro-batch over all ranks.
        rows: The rows of this rank, int64 [samples of this rank].
    """

    seed: int
    number: int
    size: int
    rows: torch.Tensor
