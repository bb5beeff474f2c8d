"""Runs every class of torchmetrics with `exact_metric` on several ranks, and compares with one."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from ranks import results_of_ranks
from torchmetrics import Metric
from torchmetrics_cases import PRETRAINED, SAMPLES, Case, cases_of, classes

from lit_mnist.distributed.gather import all_gather_json
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.plugins import exact_metric

COUNTS = (0, 1, SAMPLES)
BATCH = 4
# Sums of float32 in another order. Metrics whose states are integers must be equal bit for bit.
TOLERANCE = 1e-5

# A run of ranks is limited to a minute.
_AT_ONCE = 60

Outcome = dict[str, Any]


def outcomes_of_rank(rank: Rank, names: list[str], counts: tuple[int, ...] = COUNTS) -> dict[str, list[list[Outcome]]]:
    """Returns for each class the outcome of each of its cases with each number of samples."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return {name: [[_outcome(rank, case, count) for count in counts] for case in _cases(name)] for name in names}


def _cases(name: str) -> list[Case]:
    return cases_of(name, classes()[name])


def _outcome(rank: Rank, case: Case, count: int) -> Outcome:
    """Returns the value of a metric, or the exception, after its samples were split over the ranks."""
    torch.manual_seed(rank.rank)
    try:
        metric = exact_metric(case.make())
    except InputError as error:
        return {"rejected": str(error)}
    error = None
    size, more = divmod(count, rank.world_size)
    start = rank.rank * size + min(rank.rank, more)
    stop = start + size + (rank.rank < more)
    share = math.ceil(BATCH / rank.world_size)
    try:
        for first in range(start, stop, share):
            for call in case.calls(first, min(first + share, stop)):
                metric.update(*call)
    except Exception as raised:
        error = type(raised).__name__
    # A rank that fails ends a run. Here the others must not wait for it.
    if errors := [each for each in all_gather_json(error) if each]:
        return {"update_raises": errors[0]}
    try:
        return {"value": _plain(metric.result()), "bits": _counts(metric.metric)}
    except InputError as raised:
        return {"rejected": str(raised)}
    except Exception as raised:
        return {"raises": type(raised).__name__}


def _counts(metric: torch.nn.Module) -> bool:
    """Returns whether all states of a metric are integers."""
    metrics = [part for part in metric.modules() if isinstance(part, Metric)]
    states = [state for part in metrics for state in part.metric_state.values()]
    return bool(states) and all(isinstance(state, torch.Tensor) and not state.is_floating_point() for state in states)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.flatten().tolist()}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def differs(one: Any, other: Any, tolerance: float = TOLERANCE) -> bool:
    """Returns whether two outcomes are unlike: floats beyond the tolerance, anything else at all."""
    if isinstance(one, float) and isinstance(other, float):
        close = math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
        return not close and not (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict) and isinstance(other, dict):
        tolerance = 0 if one.get("bits") else tolerance
        return one.keys() != other.keys() or any(differs(one[key], other[key], tolerance) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) != len(other) or any(differs(*pair, tolerance) for pair in zip(one, other, strict=True))
    return bool(type(one) is not type(other) or one != other)


def installed(names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the classes that can be used here, and why others cannot."""
    usable, missing = [], {}
    for name in names:
        if name in PRETRAINED:
            missing[name] = "needs a pretrained network"
            continue
        try:
            case = _cases(name)[0]
            metric = case.make()
            for call in case.calls(0, 1):
                metric.update(*call)
        except ImportError as error:
            missing[name] = str(error)
        except Exception as error:
            # Some classes raise a RuntimeError that tells what to install.
            if "nstall" in str(error):
                missing[name] = str(error)
            else:
                usable.append(name)
        else:
            usable.append(name)
    return usable, missing


@dataclass
class Result:
    """The outcome of a class on several ranks.

    Attributes:
        equal: Number of comparisons with one rank that are equal.
        values: How many of these compare values, not exceptions.
        rejected: The messages of the others.
        different: Comparisons that are unlike.
    """

    equal: int = 0
    values: int = 0
    rejected: set[str] = field(default_factory=set)
    different: list[str] = field(default_factory=list)


def compare(
    names: list[str], folder: Path, world_sizes: tuple[int, ...], counts: tuple[int, ...] = COUNTS
) -> dict[str, Result]:
    """Returns the result of each class on several ranks."""
    if len(names) > _AT_ONCE:
        parts = [names[first : first + _AT_ONCE] for first in range(0, len(names), _AT_ONCE)]
        return {
            k: v for n, part in enumerate(parts) for k, v in compare(part, folder / f"part{n}", world_sizes).items()
        }
    found = {
        world_size: results_of_ranks(
            lambda rank: outcomes_of_rank(rank, names, counts), folder / str(world_size), world_size
        )
        for world_size in (1, *world_sizes)
    }
    results = {name: Result() for name in names}
    for name, world_size in product(names, world_sizes):
        for rank, outcomes in enumerate(found[world_size]):
            for case, (one, other) in enumerate(zip(found[1][0][name], outcomes[name], strict=True)):
                for count, expected, outcome in zip(counts, one, other, strict=True):
                    where = f"case {case} with {count} samples on rank {rank} of {world_size}"
                    if "rejected" in outcome:
                        results[name].rejected.add(outcome["rejected"])
                    elif differs(expected, outcome):
                        results[name].different.append(f"{where}: {expected} is now {outcome}")
                    else:
                        results[name].equal += 1
                        results[name].values += "value" in expected
    return results
