"""Recorded runs, written by hand: what the probes record of a program, as the checks read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import RankComparison
from ddp_doctor.evidence.requirements import ask
from ddp_doctor.faults import load_checks
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

Event = dict[str, Any]
Events = Sequence[Event]
Tensors = dict[str, torch.Tensor]
SPEC = Spec(Target("mine:main"), world_size=2)
SAMPLER = "DistributedSampler"
# The parameters of an optimizer, and the gradients that two ranks compute for each of them.
KEYS = {"0:0": "weight", "0:1": "bias"}
OWN = torch.linspace(0, 1, 4), torch.linspace(2, 1, 4)
MEAN = (OWN[0] + OWN[1]) / 2
END: Event = {"kind": "end", "step": 0, "place": "", "reached_end": True, "failures": [], "libraries": []}


def event(kind: str, step: int = 0, place: str = "mine.py:1 in main", **values: Any) -> Event:
    return {"kind": kind, "step": step, "place": place, **values}


def step(number: int = 0, **values: Any) -> Event:
    known: Event = {
        "names": KEYS,
        "optimizer": 0,
        "name": "SGD",
        "frozen": [],
        "stale": [],
        "unowned": {},
        "loaded": [],
    }
    return event("step", number, **(known | {"lr": [0.1], "base": [0.0], "sharded": False} | values))


def epoch(**values: Any) -> Event:
    known: Event = {"trains": True, "iterable": False, "drained": True, "complete": True, "indices": [0, 1, 2, 3]}
    known |= {"loader": 0, "iteration": 0, "epoch": 0, "base": 0, "dataset": "Digits", "samples": 8, "sampler": SAMPLER}
    known |= {"set_epoch": [SAMPLER], "ascending": False, "sizes": [2, 2], "batches": 2, "yielded": 2, "workers": 0}
    return event("epoch", **(known | {"worker_generators": []} | values))


def batch(number: int = 0, **values: Any) -> Event:
    known: Event = {"loader": 0, "iteration": 0, "number": number, "trains": True, "indices": [], "size": 2}
    return event("batch", **({"step": number} | known | values))


def forward(number: int = 0, **values: Any) -> Event:
    known: Event = {"gradients": True, "module": "Net", "modes": {}, "sensitive": [], "random": []}
    return event("forward", number, **(known | values))


def wrapped_pass(number: int = 0, **values: Any) -> Event:
    known: Event = {"gradients": True, "synchronizes": True, "buffers": False}
    return event("ddp_forward", number, **(known | values))


def collective(number: int = 0, op: str = "all_reduce", **values: Any) -> Event:
    return event("collective", number, op=op, **({"value": None, "size": 0, "subgroup": False} | values))


WRAPPED = event("ddp", ignored=[])


def records(*events: Events) -> list[RankRecord]:
    """Returns ranks with these events each."""
    return [RankRecord(rank, list(own)) for rank, own in enumerate(events)]


def both(*events: Event) -> list[RankRecord]:
    """Returns two ranks with the same events."""
    return records(events, events)


def journals(*events: Events) -> list[RankRecord]:
    """Returns ranks that have called these collectives and passes."""
    return [RankRecord(rank, [collective(), END], journal=list(own)) for rank, own in enumerate(events)]


def failed(kind: str, message: str) -> list[RankRecord]:
    """Returns a rank that has failed."""
    return records([event("error", type=kind, message=message, trace=f"Traceback\n{kind}: {message}", input=False)])


def trained(
    first: torch.Tensor | Tensors, second: torch.Tensor | Tensors, *events: Event, **more: Any
) -> list[RankRecord]:
    """Returns two ranks that take a step with these gradients; the weights are equal if the gradients are.

    Args:
        first: The gradients that the optimizer of rank 0 applies: one for all parameters, or one of each.
        second: Those of rank 1.
        events: What happens before the step on both ranks.
        more: Of each rank: `each`, its events before the step; `steps`, values of the step; `after`, the digest of its
            weights; `later`, its events after the step.
    """
    found = []
    for rank, applied in enumerate((first, second)):
        values: Tensors = {}
        for key in KEYS:
            gradient = applied[key] if isinstance(applied, dict) else applied
            values |= {f"before/0/{key}": torch.ones(4), f"applied/0/{key}": gradient, f"local/0/{key}": OWN[rank]}
        digests = {key: more["after"][rank] if "after" in more else str(values[f"applied/0/{key}"]) for key in KEYS}
        before = [*events, *more.get("each", ([], []))[rank]]
        steps = [step(**more.get("steps", ({}, {}))[rank]), event("stepped", optimizer=0, weights=digests)]
        found.append(RankRecord(rank, [*before, *steps, *more.get("later", ([], []))[rank], END], values))
    return found


def evidence(
    reference: RankComparison | None = None,
    compared: RankComparison | None = None,
    runs: dict[str, list[RankRecord]] | None = None,
    **ranks: list[RankRecord],
) -> Evidence:
    """Returns the evidence of an examination, in which all other runs fail.

    Args:
        reference: The comparison with one process.
        compared: That with synchronized batch norm.
        runs: Runs by names with spaces.
        ranks: Runs by their names; `single` and `ranks` are the first two.
    """
    given = Evidence(SPEC, Runs(), {})  # type: ignore[arg-type]
    given.runs = {name: Run(spec_of(own), Path(), own) for name, own in (ranks | (runs or {})).items()}
    given.reference = reference or given.reference
    if compared:
        given.compare = lambda **_: compared  # type: ignore[method-assign]
    return given


def spec_of(ranks: Sequence[RankRecord]) -> Spec:
    return replace(SPEC, world_size=max(1, len(ranks)))


class Runs:
    """Runs a program, which fails."""

    forks = False

    def run(self, spec: Spec) -> Run:
        return Run(spec, Path(), [], later=Run(spec, Path(), []) if spec.later else None)

    def preload(self, names: Sequence[str] = ()) -> None:
        pass


def found(code: str, given: Evidence) -> tuple[str, str]:
    """Returns the verdict of a check, and what it says; of a check that is made and finds nothing, nothing."""
    findings = ask(load_checks()[code], given)
    return ", ".join(finding.verdict.value for finding in findings), " ".join(finding.message for finding in findings)
