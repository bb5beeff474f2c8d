"""LD023: validation counts samples twice."""

import linecache
from pathlib import Path

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import contents, evaluation_epochs, leak, repeated_samples
from ddp_doctor.evidence.requirements import evaluation_indices
from ddp_doctor.faults.ld024_metric_averaged_incorrectly import wrong_metrics
from ddp_doctor.findings import Finding, fault, note, unclear

TITLE = "Validation counts samples twice"
CAUSE = """\
A `DistributedSampler` repeats samples until each rank has the same number, and with `drop_last` some are never
evaluated: the metric depends on the number of ranks. The difference is small, so that it looks like noise.
"""
WRONG = """\
sampler = DistributedSampler(validation, shuffle=False)    # 103 samples on 2 ranks: 104 are evaluated
loader = DataLoader(validation, batch_size, sampler=sampler)
"""
FIX = """\
Give each rank its part without padding, and combine sums and counts once, at the end:
    loader = DataLoader(Subset(dataset, range(rank, len(dataset), world_size)), batch_size)
"""
THREADS = ("pytorch/pytorch#25162", "Lightning-AI/pytorch-lightning#5060")
NEEDS = (evaluation_indices,)
# A metric that changes by less chooses the same checkpoint.
_SMALL = 1e-3


def check(evidence: Evidence) -> list[Finding]:
    """Counts the samples of each evaluation on all ranks, and compares its metrics with those of one process."""
    ranks = evidence.ranks
    # If each rank has its own split, it has no samples of another one.
    for events in [] if leak(ranks) else evaluation_epochs(ranks):
        repeated, first = repeated_samples(events), events[0]
        if repeated and contents(ranks, first["base"]).same is not False:
            drawn = [index for event in events for index in event["indices"]]
            total, size = len(drawn), len(set(drawn))
            message = f"The {size} samples of the evaluation are counted as {total} by the {first['sampler']}."
            found = fault(message, first["step"], "", f"{total} instead of {size} samples", first["place"])
            return _judged(evidence, found, total, first.get("by", ""))
    return []


def _judged(evidence: Evidence, found: Finding, total: int, evaluator: str) -> list[Finding]:
    collectives = [event for rank in evidence.ranks for event in rank.of_kind("collective") if event["place"]]
    where = found.step, "", found.amount, found.place
    if any(event["value"] == total for event in collectives):
        return [fault(f"{found.message} The ranks add up their numbers to {total}.", *where)]
    if any("gather_for_metrics" in _line(event["place"]) for event in collectives):
        # accelerate drops the repeated samples.
        return []
    metrics, cannot = wrong_metrics(evidence)
    # Those that have another cause are LD024's.
    padded = [metric for metric in metrics if not (metric.own or metric.is_scaled(len(evidence.ranks)))]
    if padded:
        worst = max(padded, key=lambda metric: metric.difference)
        name = worst.number.name
        values = f"{worst.number.value:.6g} on several ranks and {worst.expected:.6g} on one process"
        message = f"{found.message} With the same weights, {name or 'the metric'} is {values}."
        # The Trainer of transformers drops the repeated samples of predictions, and not of its loss.
        small = worst.difference <= _SMALL or "transformers" in Path(evaluator).parts
        return [(note if small else fault)(message, found.step, name, found.amount, found.place)]
    if metrics or (any(rank.of_kind("reported") for rank in evidence.ranks) and not cannot):
        return [note(f"{found.message} No reported metric is seen to change by it alone.", *where)]
    return [unclear(f"{found.message} Whether that changes a metric was not seen.", *where)]


def _line(place: str) -> str:
    path, _, rest = place.rpartition(":")
    return linecache.getline(path, int(rest.split(" ")[0])) if path else ""
