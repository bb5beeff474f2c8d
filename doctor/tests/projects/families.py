"""The families of the suite: files in which each function is a program of its own, with the expected report of each."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from projects import (
    accumulations,
    checkpoints,
    communication,
    decisions,
    evaluations,
    libraries,
    lightning_family,
    models,
    own_weights,
    parallelism,
    queues,
    randomness,
    schedules,
    unusual_loops,
)
from projects.cases import Case

# What the programs of a file have in common.
_FAMILIES: Mapping[str, ModuleType] = {
    "programs that communicate in other ways": communication,
    "programs whose ranks draw random numbers": randomness,
    "programs that shard, average, join or checkpoint": parallelism,
    "programs with uneven ranks, norms and files": unusual_loops,
    "programs with transformers and accelerate": libraries,
    "programs with Fabric, pytorch_lightning, and a trainer of their own": lightning_family,
    "programs whose ranks decide": decisions,
    "programs that report a metric": evaluations,
    "programs with a schedule": schedules,
    "programs that save what a resumed run needs": checkpoints,
    "programs with several models, streams and batch norm": models,
    "programs that accumulate gradients": accumulations,
    "programs with a codebook or a queue": queues,
    "programs whose ranks hold weights of their own": own_weights,
}


def cases(module: ModuleType) -> tuple[Case, ...]:
    """Returns the programs of a file; a value of its table is (code, verdict, note), or without the verdict."""
    found = []
    for name, (code, *verdict, note) in module.EXPECTED.items():
        path = f"{module.__name__.rpartition('.')[2]}.py"
        codes = (code,) if code else ()
        found.append(Case(name, path, name, codes=codes, verdict=next(iter(verdict), "") or "fault", note=note))
    return tuple(found)


FAMILIES = {name: cases(module) for name, module in _FAMILIES.items()}
FAULTY = tuple(case for found in FAMILIES.values() for case in found if case.codes)
HEALTHY = tuple(case for found in FAMILIES.values() for case in found if not case.codes)
