"""Times all-reduce over the message sizes: gloo's own, the ring, and the parameter server.

The operations alternate in one run, so that other load of the machine affects them equally. Bandwidths are defined as
in NVIDIA's NCCL tests (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): algorithm bandwidth is
the message's bytes / time. Bus bandwidth is that times 2 (N - 1) / N, the share that a ring moves over each link: it
can be compared between numbers of ranks and with the hardware. All three operations use this formula, whatever they
send.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from examples.collectives.group import joined, on_first
from examples.collectives.ring import Line, ring_all_reduce, server_all_reduce
from lit_mnist.distributed.rank import Rank, count_cores
from lit_mnist.profiling.timing import commit, versions

SMALLEST, LARGEST = 1024, 64 * 1024**2
WARM_UP = 3
_BYTES_PER_SIZE = 128 * 1024**2
_FEWEST, _MOST = 9, 101

AllReduce = Callable[[torch.Tensor, Line], None]


def _gloo(tensor: torch.Tensor, line: Line) -> None:
    dist.all_reduce(tensor)


OPERATIONS: dict[str, AllReduce] = {"all_reduce": _gloo, "ring": ring_all_reduce, "server": server_all_reduce}


@dataclass(frozen=True)
class Measurement:
    """The measurement of one operation for one message size.

    Attributes:
        operation: `all_reduce` (gloo's own), `ring` or `server`.
        bytes: Size of each rank's tensor.
        repeats: Number of measurements.
        seconds: Median of the time on the slowest rank.
        seconds_q1: The first quartile of these times.
        seconds_q3: The third quartile.
        algorithm_gb_per_s: Algorithm bandwidth in 10^9 bytes per second.
        bus_gb_per_s: Bus bandwidth in 10^9 bytes per second.
        bytes_sent: Bytes that each rank sent, counted at the calls; None for gloo's own.
    """

    operation: str
    bytes: int
    repeats: int
    seconds: float
    seconds_q1: float
    seconds_q3: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float
    bytes_sent: list[int] | None


def sizes(largest: int) -> list[int]:
    """Returns the message sizes in bytes: powers of 4 times 1 KiB, up to `largest`."""
    found = [SMALLEST]
    while found[-1] * 4 <= largest:
        found.append(found[-1] * 4)
    return found


def repeats_of(size: int) -> int:
    """Returns the number of measurements of a size: odd, and lower for large messages."""
    return max(_FEWEST, min(_MOST, _BYTES_PER_SIZE // size | 1))


def bench(rank: Rank, largest: int) -> dict[str, Any]:
    """Measures all operations and sizes; rank 0 prints one line per size.

    Args:
        rank: This rank.
        largest: Largest message in bytes.

    Returns:
        On rank 0 the measurements and their conditions as plain values; empty on the others.

    Raises:
        RuntimeError: An operation gave a wrong sum.
    """
    measurements: list[Measurement] = []
    if rank.is_first:
        print(_heading(rank))
    with joined(rank):
        for size in sizes(largest):
            row = _measure(rank, size)
            measurements += row
            if rank.is_first:
                print(_line(size, row), flush=True)
    if not rank.is_first:
        return {}
    return {
        "world_size": rank.world_size,
        "backend": "gloo",
        "device": "cpu",
        "cores": count_cores(),
        "threads": torch.get_num_threads(),
        "dtype": "float32",
        "warm_up": WARM_UP,
        "figures": [vars(measurement) for measurement in measurements],
        "versions": versions(),
        "commit": commit(),
    }


def _measure(rank: Rank, size: int) -> list[Measurement]:
    """Returns one measurement per operation on rank 0, none on the others."""
    repeats = repeats_of(size)
    tensor = torch.empty(size // 4)
    seconds = torch.zeros(len(OPERATIONS), repeats, dtype=torch.float64)
    sent = torch.zeros(len(OPERATIONS), dtype=torch.int64)
    for repeat in range(-WARM_UP, repeats):
        for number, (name, all_reduce) in enumerate(OPERATIONS.items()):
            line = Line()
            taken = _time(rank, tensor, name, all_reduce, line)
            if repeat >= 0:
                seconds[number, repeat] = taken
            sent[number] = line.bytes_sent
    # An operation ends when it ends on the slowest rank.
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    sent_by_rank = on_first(rank, sent.tolist())
    if not rank.is_first:
        return []
    return [
        _measurement(name, size, times, None if all_reduce is _gloo else [row[number] for row in sent_by_rank])
        for number, ((name, all_reduce), times) in enumerate(zip(OPERATIONS.items(), seconds.tolist(), strict=True))
    ]


def _time(rank: Rank, tensor: torch.Tensor, name: str, all_reduce: AllReduce, line: Line) -> float:
    """Returns the seconds of one all-reduce on this rank, from a barrier to its own end."""
    tensor.fill_(rank.rank + 1)
    dist.barrier()
    start = time.perf_counter()
    all_reduce(tensor, line)
    taken = time.perf_counter() - start
    expected = rank.world_size * (rank.world_size + 1) / 2
    if not bool((tensor == expected).all()):
        raise RuntimeError(f"{name} gave a wrong sum of {tensor.numel()} numbers")
    return taken


def _measurement(name: str, size: int, times: list[float], bytes_sent: list[int] | None) -> Measurement:
    q1, seconds, q3 = statistics.quantiles(times, n=4, method="inclusive")
    world_size = dist.get_world_size()
    bandwidth = size / seconds / 1e9
    return Measurement(
        operation=name,
        bytes=size,
        repeats=len(times),
        seconds=seconds,
        seconds_q1=q1,
        seconds_q3=q3,
        algorithm_gb_per_s=bandwidth,
        bus_gb_per_s=bandwidth * 2 * (world_size - 1) / world_size,
        bytes_sent=bytes_sent,
    )


def _heading(rank: Rank) -> str:
    names = "".join(f"{name:>11}" for name in OPERATIONS)
    width = 11 * len(OPERATIONS)
    return "\n".join(
        [
            f"All-reduce of float32 on {rank.world_size} ranks (gloo, CPU, {torch.get_num_threads()} threads each)",
            f"Medians of the slowest rank's time, without the first {WARM_UP} of each size; the operations alternate.",
            f"Bandwidths as NCCL's tests define them: bus = algorithm x 2 (N - 1) / N, N = {rank.world_size}.",
            "",
            f"{'':>8}{'':>9}{'latency in microseconds':>{width}}{'algorithm GB/s':>{width}}{'bus GB/s':>{width}}",
            f"{'bytes':>8}{'repeats':>9}{names * 3}",
        ]
    )


def _line(size: int, row: list[Measurement]) -> str:
    latencies = "".join(f"{measurement.seconds * 1e6:>11,.0f}" for measurement in row)
    algorithm = "".join(f"{measurement.algorithm_gb_per_s:>11.3g}" for measurement in row)
    bus = "".join(f"{measurement.bus_gb_per_s:>11.3g}" for measurement in row)
    return f"{in_words(size):>8}{row[0].repeats:>9}{latencies}{algorithm}{bus}"


def in_words(size: int) -> str:
    """Returns a size in bytes as KiB or MiB."""
    return f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size // 1024} KiB"
