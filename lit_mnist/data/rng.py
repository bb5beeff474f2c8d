"""Random numbers without a hidden state: each is a function of the seed and of what it is for.

A generator that is carried along must be saved, restored and split between ranks. These numbers need none of that:
the seed, a purpose, and the counters (an epoch, a step, a sample) go through a 64-bit mixing function, so that any
rank computes the number of any sample, in any order, as often as it likes.
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
    """Returns the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators)."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def random_bits(seed: int, purpose: str, *counters: int | npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Returns 64 random bits for each combination of the counters.

    Args:
        seed: The experiment's seed.
        purpose: What the numbers are for; different purposes give unrelated numbers.
        counters: Integers or integer arrays that broadcast against each other, such as an epoch and sample indices.

    Returns:
        A uint64 array of the counters' common shape (0-dimensional for plain integers).
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seed, dtype=np.uint64) + _GOLDEN)
        for counter in (zlib.crc32(purpose.encode()), *counters):
            state = _mix((state ^ np.asarray(counter).astype(np.uint64)) * _MIX_2 + _GOLDEN)
    return state


def uniform(seed: int, purpose: str, *counters: int | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """Returns numbers of [0, 1), evenly distributed with 53 bits; arguments as of `random_bits`."""
    return (random_bits(seed, purpose, *counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def derived_seed(seed: int, purpose: str, *counters: int) -> int:
    """Returns a seed from 0 to 2**63 - 1 for a library's own generator; arguments as of `random_bits`."""
    return int(random_bits(seed, purpose, *counters) >> np.uint64(1))


def permutation(seed: int, purpose: str, count: int, *counters: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of 0 to count - 1, as int64 [count]; arguments as of `random_bits`."""
    keys = random_bits(seed, purpose, *counters, np.arange(count))
    return np.argsort(keys, kind="stable")


class Draw(NamedTuple):
    """Names the random numbers that a rank uses inside the network for one micro-batch.

    A mask is drawn for the whole micro-batch, and each rank takes its rows of it: so the number of ranks changes no
    sample's mask.

    Attributes:
        seed: The experiment's seed.
        number: The micro-batch's number, counted over the whole run.
        size: Samples of the micro-batch over all ranks.
        rows: This rank's rows of the micro-batch, int64 [samples of this rank].
    """

    seed: int
    number: int
    size: int
    rows: torch.Tensor
