"""A model of a step's time: what it takes on N ranks, over a network of some bandwidth and latency.

    T(N) = compute + wait * sqrt(K) * E(N) + per_round * rounds(N) + per_byte * bytes(N)

- compute: seconds per sample times samples per rank; the same loop has the same, whatever it shares.
- wait: ranks that have the same to do do not end together, and each collective waits for the last. E(N) is the
  expected largest of N standard normal numbers; K collectives cut a step into parts, which vary on their own.
- rounds: messages that the busiest rank takes, one after the other; bytes: what it moves, likewise. The ring of N
  ranks sums up n bytes in 2 (N - 1) rounds and 2 (N - 1) / N * n bytes (Patarasuk and Yuan, 2009).

Where there are more ranks than cores they share these: what all ranks compute and handle, divided by the cores, is then
a bound. The coefficients are those that fit measured steps best, by the relative error, none below zero.

Where the gradients are one bucket (up to 25 MiB) nothing of them hides behind the backward pass. Where they are several
(`workload.py`), the formula is a bound from above. A bound from below takes off what could hide at best: all buckets
but the last, and no more of them than the backward pass has time for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from benchmarks.workload import Workload
from lit_mnist.errors import InputError

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A measured step: the workload, the number of ranks, and the seconds."""

    workload: Workload
    ranks: int
    seconds: float


@dataclass(frozen=True)
class Prediction:
    """A step that was not measured: its seconds, and the share of them, 0 to 1, in which a rank computes."""

    ranks: int
    seconds: float
    efficiency: float


@dataclass(frozen=True)
class StepModel:
    """Coefficients, all at least 0.

    Attributes:
        compute: Seconds per sample of each loop on its own cores.
        wait: Seconds by which a rank's step varies: a standard deviation.
        per_round: Seconds that handling a round takes on the measured machine.
        per_byte: Likewise a byte.
        cores: Cores of the measured machine.
        threads: Threads of each rank.
    """

    compute: Mapping[str, float]
    wait: float
    per_round: float
    per_byte: float
    cores: int
    threads: int

    def step_seconds(self, workload: Workload, ranks: int) -> float:
        """Returns the seconds of a step on the measured machine; InputError where the loop was not measured."""
        self._require(workload)
        row = _row(workload, ranks, list(self.compute), self.cores, self.threads)
        return float(row @ np.array([*self.compute.values(), self.wait, self.per_round, self.per_byte]))

    def predict(
        self,
        workload: Workload,
        ranks: int,
        bandwidth_bytes_per_s: float,
        latency_s: float,
        *,
        hides: bool = False,
    ) -> Prediction:
        """Returns a step on ranks that each have cores of their own, over a network.

        What handling a round and a byte takes on the measured machine is added to the network's own time.

        Args:
            workload: The program.
            ranks: Number of ranks.
            bandwidth_bytes_per_s: Bytes per second that a rank sends, and at the same time receives.
            latency_s: Seconds that a message of no length takes.
            hides: Whether all that can hide behind the backward pass does: the bound from below.

        Raises:
            InputError: A number is not positive, or the loop was not measured.
        """
        if ranks < 1 or bandwidth_bytes_per_s <= 0 or latency_s < 0:
            raise InputError("A prediction needs at least one rank, a bandwidth above 0 and no latency below 0.")
        self._require(workload)
        compute = self.compute[workload.loop] * workload.samples
        shared = workload.collectives if ranks > 1 else ()
        seconds = compute + self.wait * _waits(workload, ranks)
        hidden = 0.0
        for each in shared:
            spent = self.per_round * each.rounds(ranks) + latency_s * each.hops(ranks)
            spent += (self.per_byte + 1 / bandwidth_bytes_per_s) * each.moved(ranks)
            seconds += spent
            hidden += spent if hides and each.hideable else 0.0
        seconds -= min(hidden, workload.backward * compute / workload.micro_batches)
        return Prediction(ranks, seconds, compute / seconds)

    def _require(self, workload: Workload) -> None:
        if workload.loop not in self.compute:
            raise InputError(f"Nothing was measured of {workload.loop!r}: known are {', '.join(self.compute)}.")


def fit(points: Sequence[Point], *, cores: int, threads: int) -> StepModel:
    """Returns the model that fits measured steps best.

    Args:
        points: The steps; they must tell the coefficients apart, and the first is of the loop that does least.
        cores: Cores that the ranks shared.
        threads: Threads of each rank.

    Raises:
        InputError: There are too few points, or they are too much alike.
    """
    loops = list(dict.fromkeys(point.workload.loop for point in points))
    unknowns = len(loops) + 3
    if len(points) <= unknowns:
        raise InputError(f"A model of {unknowns} coefficients needs more than {unknowns} points, not {len(points)}.")
    rows = np.array([_row(point.workload, point.ranks, loops, cores, threads) for point in points])
    # What a loop takes beyond the first is fitted, so that none takes less.
    rows[:, 0] = rows[:, : len(loops)].sum(axis=1)
    seconds = np.array([point.seconds for point in points])
    relative = rows / seconds[:, None]
    # Seconds per byte are a million times smaller than seconds per round.
    sizes = np.linalg.norm(relative, axis=0)
    if np.any(sizes == 0) or np.linalg.matrix_rank(relative / sizes) < unknowns:
        raise InputError("The points are too much alike to fit the model: measure more programs or numbers of ranks.")
    found = _least_squares(relative / sizes, np.ones(len(points))) / sizes
    first, *others, wait, per_round, per_byte = map(float, found)
    compute = [first, *(first + other for other in others)]
    return StepModel(dict(zip(loops, compute, strict=True)), wait, per_round, per_byte, cores, threads)


def errors(model: StepModel, points: Sequence[Point]) -> list[float]:
    """Returns for each point by which share of the measured time the model is above it."""
    return [model.step_seconds(point.workload, point.ranks) / point.seconds - 1 for point in points]


def held_out_errors(
    points: Sequence[Point], group: Callable[[Point], object], *, cores: int, threads: int
) -> list[float | None]:
    """Returns each point's error by a model fitted without all points of its group; None where the others are few."""
    found: list[float | None] = []
    for point in points:
        others = [other for other in points if group(other) != group(point)]
        try:
            found.append(errors(fit(others, cores=cores, threads=threads), [point])[0])
        except InputError:
            found.append(None)
    return found


def _row(workload: Workload, ranks: int, loops: Sequence[str], cores: int, threads: int) -> Matrix:
    """Returns what each coefficient is multiplied by on a machine whose cores the ranks share."""
    samples = workload.samples * max(1.0, ranks * threads / cores)
    shared = [(each, each.crowding(ranks, cores)) for each in workload.collectives if ranks > 1]
    rounds = sum(each.rounds(ranks) * crowding for each, crowding in shared)
    moved = sum(each.moved(ranks) * crowding for each, crowding in shared)
    compute = [samples if loop == workload.loop else 0.0 for loop in loops]
    return np.array([*compute, _waits(workload, ranks), rounds, moved])


def _waits(workload: Workload, ranks: int) -> float:
    return math.sqrt(len(workload.collectives)) * expected_largest(ranks) if ranks > 1 else 0.0


@cache
def expected_largest(count: int) -> float:
    """Returns the expected largest of so many independent standard normal numbers."""
    x = np.linspace(0.0, 9.0, 4001)
    above = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in x])
    # The mean of a variable is the integral of 1 - F(x) - F(-x) over x > 0.
    return float(np.trapezoid(1 - (1 - above) ** count - above**count, x))


def _least_squares(matrix: Matrix, target: Matrix) -> Matrix:
    """Returns the coefficients, none below 0, of the least sum of squared errors, by trying which of them are 0."""
    width = matrix.shape[1]
    best, least = np.zeros(width), math.inf
    for kept in (chosen for size in range(1, width + 1) for chosen in combinations(range(width), size)):
        found = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        error = float(np.sum((matrix[:, kept] @ found - target) ** 2))
        if np.all(found >= 0) and error < least:
            best, least = np.zeros(width), error
            best[list(kept)] = found
    return best
