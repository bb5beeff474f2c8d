"""LD023: validation counts samples twice."""

from __future__ import annotations

import linecache
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import contents, evaluation_epochs, repeated_samples
from ddp_doctor.findings import Finding, fault, not_reached, unclear
from ddp_doctor.records.run import Run

CODE = "LD023"
TITLE = "Validation counts samples twice"
CAUSE = """\
A `DistributedSampler` repeats samples until each rank has the same number. In an evaluation, these count
twice, and with `drop_last` some are never evaluated. The metric depends on the number of ranks. The
difference is small, so that it looks like noise.
"""
FIX = """\
Give each rank its part without padding, and combine sums and counts:
    indices = range(rank, len(dataset), world_size)
    loader = DataLoader(Subset(dataset, indices), batch_size)
Collectives within the loop need equal numbers of batches: combine once, at the end.
"""
THREADS = ("pytorch/pytorch#25162", "Lightning-AI/pytorch-lightning#5060")
STRUCTURAL = True
_TOLERANCE = 1e-6


def check(evidence: Evidence) -> list[Finding]:
    """Counts the samples of each evaluation on all ranks, and compares its metrics with those of one process."""
    ranks = evidence.ranks
    if ranks and not any(rank.evaluation_epochs for rank in ranks):
        return [not_reached("The program evaluates nothing through a DataLoader.")]
    for events in evaluation_epochs(ranks):
        repeated = repeated_samples(events)
        if not repeated or contents(ranks, events[0]["base"]).same is False:
            continue
        total, size = sum(len(event["indices"]) for event in events), len({i for e in events for i in e["indices"]})
        shown = ", ".join(map(str, repeated[:4]))
        message = f"The {size} samples of the evaluation are counted as {total}: sample {shown} is repeated"
        message += f" by the {events[0]['sampler']}, so that the ranks get equal numbers."
        values = {
            "step": events[0]["step"],
            "amount": f"{total} instead of {size} samples",
            "place": events[0]["place"],
        }
        return (
            _of_module(evidence, message, values)
            if _is_module(evidence)
            else _of_loop(evidence, message, values, total)
        )
    return []


def _is_module(evidence: Evidence) -> bool:
    return bool(evidence.single and evidence.single.end.get("module"))


def _of_module(evidence: Evidence, message: str, values: dict[str, Any]) -> list[Finding]:
    one = _metrics(evidence.run("evaluate1", purpose="evaluate", world_size=1, same_seed=True))
    several = _metrics(evidence.run("evaluate", purpose="evaluate", same_seed=True))
    different = [name for name in one if name in several and not _close(one[name], several[name])]
    if not different:
        return []
    name = different[0]
    change = {"unpadded": True}
    fixed = _metrics(evidence.run("unpadded", purpose="evaluate", same_seed=True, interventions=change))
    message += f" {name} is {several[name]:.6g}, and {one[name]:.6g} on one process."
    values = {
        **values,
        "tensor": name,
        "amount": f"{values['amount']}; {name} differs by {several[name] - one[name]:.1e}",
    }
    if name in fixed and _close(fixed[name], one[name]):
        proof = f"with each sample once, {name} is {fixed[name]:.6g} on several ranks, too"
        return [fault(message, proof=proof, **values)]
    message += " The difference remains with each sample once: it has another cause, too."
    return [unclear(message, **values)]


def _of_loop(evidence: Evidence, message: str, values: dict[str, Any], total: int) -> list[Finding]:
    collectives = [event for rank in evidence.ranks for event in rank.of_kind("collective") if event["place"]]
    if any(event["value"] == total for event in collectives):
        message += f" The ranks add up their numbers to {total}."
        return [fault(message, **values)]
    if any("gather_for_metrics" in _line(event["place"]) for event in collectives):
        # accelerate drops the repeated samples.
        return []
    message += " Whether that changes a metric was not seen."
    return [unclear(message, **values)]


def _line(place: str) -> str:
    path, _, rest = place.rpartition(":")
    return linecache.getline(path, int(rest.split(" ")[0])) if path else ""


def _metrics(run: Run) -> dict[str, float]:
    events = run.ranks[0].of_kind("metrics") if run.worked else []
    return dict(events[-1]["values"]) if events else {}


def _close(first: float, second: float) -> bool:
    return abs(first - second) <= _TOLERANCE * max(1.0, abs(first))
