"""Growth with ranks over a network: a model from constants of two ranks, and runs that check it on more ranks.

The runs are those of `benchmarks/variants.py`. The model knows the step without communication on as many ranks, the
number of parameters, and four constants of two ranks: the time of a hop from one rank to the next and of each element
in it, each divided into that of the network and that of the processor. The ranks share the cores of this machine, so
that the latter grows with their number.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.network import LINKS, Link, network
from benchmarks.programs import printed_numbers
from benchmarks.rounds import Measurement, Numbers, Rows, Topic
from benchmarks.variants import (
    ALONE,
    BFLOAT16,
    DDP,
    LARGE,
    LOCAL_SGD,
    NETWORKS,
    RANKS,
    SMALL,
    STEPS_BETWEEN_AVERAGES,
    count_parameters,
)
from lit_mnist.distributed.rank import count_cores
from lit_mnist.errors import InputError

# The ranks of which the constants are measured. Their ring has as many hops.
_PAIR = 2


@dataclass(frozen=True)
class Constants:
    """What is measured on two ranks, in milliseconds.

    Attributes:
        hop: Of the network, for a message of next to nothing from one rank to the next.
        element: Of the network, for one more float32 element in a message.
        hop_cpu: Of a core, for each rank and hop.
        element_cpu: Of a core, for one more element.
        cores: Number of cores that the ranks share.
    """

    hop: float
    element: float
    hop_cpu: float
    element_cpu: float
    cores: int

    @classmethod
    def of(cls, numbers: Numbers, cores: int) -> Constants:
        """Returns the constants from the numbers of two ranks.

        Args:
            numbers: The times of a small and a large all-reduce, and the processor's times of all ranks for each.
            cores: Number of cores that the ranks share.
        """
        crowding = max(1.0, _PAIR / cores)
        more = LARGE - SMALL
        hop_cpu = numbers["small_cpu_ms"] / _PAIR**2
        # Each of the two messages of a rank has half of the elements.
        element_cpu = max(0.0, (numbers["large_cpu_ms"] - numbers["small_cpu_ms"]) / (_PAIR * more))
        hop = max(0.0, numbers["small_ms"] / _PAIR - crowding * hop_cpu)
        element = max(0.0, (numbers["large_ms"] - numbers["small_ms"]) / more - crowding * element_cpu)
        return cls(hop, element, hop_cpu, element_cpu, cores)

    def all_reduce(self, elements: float, ranks: int) -> float:
        """Returns the milliseconds of a ring all-reduce (Patarasuk and Yuan, 2009) of float32 elements."""
        part, crowding = elements / ranks, max(1.0, ranks / self.cores)
        hop = self.hop + self.element * part + crowding * (self.hop_cpu + self.element_cpu * part)
        return 2 * (ranks - 1) * hop


def predict(variant: str, alone_ms: float, elements: int, ranks: int, constants: Constants) -> float | None:
    """Returns the milliseconds of a step, or None where the model says nothing.

    Args:
        variant: A variant of `benchmarks/variants.py`.
        alone_ms: Milliseconds of a step without communication, on as many ranks.
        elements: Number of parameters.
        ranks: Number of ranks.
        constants: Those of the network.
    """
    exchanged = {
        ALONE: 0.0,
        DDP: constants.all_reduce(elements, ranks),
        BFLOAT16: constants.all_reduce(elements / 2, ranks),
        LOCAL_SGD: constants.all_reduce(elements, ranks) / STEPS_BETWEEN_AVERAGES,
    }
    return alone_ms + exchanged[variant] if variant in exchanged else None


def growth() -> Topic:
    """How does a step grow with ranks and with the network between them, and what pays from which network on?"""
    return Topic(
        name="growth",
        title="Growth with ranks over a network",
        measurements=[
            Measurement(name_of(ranks, link), partial(_take, ranks, link), "step_ms", _lacks_network)
            for link in LINKS
            for ranks in RANKS
        ],
        analyse=analyse,
        notes=(
            f"Each rank is in its own network namespace. All share {count_cores()} cores. The main number is the step "
            "of the ConvNet with DDP.",
            "The predictions follow from the step without communication on as many ranks, the number of parameters, "
            "and two all-reduces of two ranks.",
        ),
    )


def name_of(ranks: int, link: Link) -> str:
    """Returns the name of a measurement."""
    return f"{ranks} ranks, {link.name}"


def analyse(rows: Rows) -> Mapping[str, Any]:
    """Returns the constants of each link, and the steps that were measured and predicted."""
    found = []
    for link in LINKS:
        medians = {ranks: _medians(rows[name_of(ranks, link)]) for ranks in RANKS}
        if medians[_PAIR]:
            constants = Constants.of(medians[_PAIR], count_cores())
            steps = [step for ranks in RANKS if medians[ranks] for step in _steps(ranks, medians[ranks], constants)]
            found.append({**asdict(link), "constants_ms": asdict(constants), "steps": steps})
    return {"growth": found}


def _steps(ranks: int, numbers: Numbers, constants: Constants) -> Iterator[dict[str, Any]]:
    for net, (_, variants) in NETWORKS.items():
        for variant in variants:
            alone = numbers[f"{net}/{ALONE}"]
            yield {
                "net": net,
                "ranks": ranks,
                "variant": variant,
                "measured_ms": numbers[f"{net}/{variant}"],
                "predicted_ms": predict(variant, alone, count_parameters(net), ranks, constants),
            }


def _medians(taken: Any) -> dict[str, float]:
    return {name: statistics.median(numbers[name] for numbers in taken) for name in (taken[0] if taken else ())}


def _take(ranks: int, link: Link, folder: Path) -> Numbers:
    words = ("--ranks", ranks, "--gbit", link.gbit_per_s, "--latency", link.latency_ms)
    numbers = printed_numbers("-m", "benchmarks.variants", *words, folder=folder)
    return {"step_ms": numbers[f"ConvNet/{DDP}"], **numbers}


def _lacks_network(rows: Rows) -> str | None:
    try:
        with network(1, LINKS[0]):
            return None
    except InputError as error:
        return str(error)
