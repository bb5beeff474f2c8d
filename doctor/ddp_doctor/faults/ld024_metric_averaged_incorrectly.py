"""LD024: a metric is averaged incorrectly."""

from __future__ import annotations

from collections import Counter
from math import isclose, isnan
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import evaluation_epochs, repeated_samples, select_differently
from ddp_doctor.evidence.reports import LARGE, monitored, wrong_metrics
from ddp_doctor.findings import Finding, Verdict, cannot_tell, depends, fault, not_reached, note
from ddp_doctor.records.run import RankRecord, Run

CODE = "LD024"
TITLE = "A metric is averaged incorrectly"
CAUSE = """\
The mean of the ranks' means is the global mean only if all ranks have the same number of samples. The mean of
an F1 score or of a perplexity over batches is not the score at all. `self.log(..., sync_dist=True)` averages
the ranks, and in Lightning 2.6.6 also rounds the number of samples, which makes the value too large when the
ranks have different numbers. The curve looks normal.
"""
WRONG = """\
accuracy = (logits.argmax(1) == labels).float().mean()
dist.all_reduce(accuracy)
accuracy /= world_size    # the mean of means over unequal numbers of samples
"""
FIX = """\
Combine the sums and counts of all ranks before you divide, or log the metric object:
    dist.all_reduce(correct)                   # the number of this rank's correct predictions
    dist.all_reduce(count)                     # the number of its samples
    accuracy = correct / count
In Lightning:
    self.accuracy(logits, labels)              # a torchmetrics object
    self.log('accuracy', self.accuracy)        # not its value
"""
THREADS = ("Lightning-AI/pytorch-lightning#12354", "Lightning-AI/pytorch-lightning#21859")
STRUCTURAL = False
# Relative; metrics are computed in 32 bits.
_SAME = 1e-4
_ISSUE = "Lightning-AI/pytorch-lightning#21859"


def check(evidence: Evidence) -> list[Finding]:
    """Compares the metrics of the same weights and samples on one process and on several ranks."""
    if not evidence.is_module:
        return _of_program(evidence)
    single, several = evidence.worked("evaluate1"), evidence.worked("evaluate")
    if single is None or several is None:
        return _not_compared(evidence)
    if _samples(single) != _samples(several):
        # Samples that are missing or counted twice explain a difference: LD023.
        return [cannot_tell("The ranks evaluate other samples than one process, so no metric was compared.")]
    right, ours = single.ranks[0].metrics, [rank.metrics for rank in several.ranks]
    names = [name for name in right if name in ours[0]]
    if not names:
        return [not_reached("The validation logs no metric.")]
    wrong = [name for name in names if any(not _equal(values.get(name), right[name]) for values in ours)]
    if not wrong:
        return []
    if _is_random(evidence, right):
        return [cannot_tell("The metrics depend on random numbers.")]
    found = [_finding(several, name, right[name], ours) for name in wrong]
    # The first fault, or the first note: other metrics of a module have the same cause.
    return ([finding for finding in found if finding.verdict is Verdict.FAULT] or found)[:1]


def _not_compared(evidence: Evidence) -> list[Finding]:
    if run := evidence.failed("evaluate1", "evaluate"):
        where = "one process" if run.spec.world_size == 1 else "several ranks"
        return [cannot_tell(f"The validation on {where} fails ({run.short_reason}), so no metric was compared.")]
    return [not_reached("There is no validation.")] if evidence.trained else []


def _of_program(evidence: Evidence) -> list[Finding]:
    """Compares the numbers that rank 0 alone reports of an evaluation with unchanged weights."""
    if not any(rank.evaluation_epochs for rank in evidence.ranks):
        return [not_reached("There is no validation.")] if evidence.trained else []
    if any(map(select_differently, evaluation_epochs(evidence.ranks))):
        return [cannot_tell("The ranks divide different selections of the samples (LD005), so no metric was compared.")]
    found, cannot = wrong_metrics(evidence)
    if any(repeated_samples(events) for events in evaluation_epochs(evidence.ranks)):
        # They explain other differences: LD023.
        found, cannot = [metric for metric in found if metric.own or metric.is_scaled(len(evidence.ranks))], ""
    if cannot:
        return [cannot_tell(cannot)]
    if not found:
        return []
    metric = max(found, key=lambda metric: (metric.own, metric.decides and metric.difference > LARGE))
    name = f"The reported {metric.name or 'metric'}"
    values = f"{metric.value:.6g} on {len(evidence.ranks)} ranks and {metric.alone:.6g} on one process"
    where = metric.step, metric.name, f"{metric.difference:.1e} of the value", metric.place
    message = f"{name} of the same weights and samples is {values}."
    if metric.own and _only_logged(evidence, metric.name):
        how = "It is that of the samples of rank 0: it was logged without sync_dist, and no callback monitors it."
        return [note(f"{message} {how}", *where)]
    if metric.own:
        return [fault(f"{message} It is that of the samples of rank 0: the other ranks do not change it.", *where)]
    if metric.is_scaled(len(evidence.ranks)):
        return [fault(f"{message} The ranks' values are summed, or divided by their number once more.", *where)]
    how = "It is combined over the ranks, but not as over all samples at once"
    if metric.difference > LARGE and metric.decides:
        return [fault(f"{message} {how}, and a callback or a condition decides by it.", *where)]
    return [depends(f"{message} {how}.", *where)]


def _only_logged(evidence: Evidence, name: str) -> bool:
    """Returns whether a Trainer logs a metric, as one of rank 0 by default, and no callback decides by it."""
    events = evidence.trained[0].of_kind("reported")
    logged = any(event["name"] == name and event.get("by_trainer") for event in events)
    return logged and not monitored(evidence) & {name, name.removesuffix("_epoch")}


def _finding(run: Run, name: str, right: float, ours: list[dict[str, float]]) -> Finding:
    logs = [_logs(record, name) for record in run.ranks]
    value, count, entries = ours[0][name], len(ours), [entry for events in logs for entry in events]
    place = next((event["place"] for event, _ in entries), "")
    where = None, name, f"{abs(value - right) / (abs(right) or 1.0):.1e} of the value", place
    message = f"{name} of the same weights and samples is {value:.6g} on {count} ranks and {right:.6g} on one process."
    mean = _mean(entries)
    if mean is not None and _equal(mean, right):
        if len({values.get(name) for values in ours}) > 1:
            text = f"{name} of rank 0 is that of its own samples: {value:.6g}; of all samples it is {right:.6g}."
            return note(text, *where)
        sizes = [sum(size for _, size in events) for events in logs]
        total = sum(sizes)
        message += (
            f" The module is right: the logged values, weighted by their batch sizes ({' + '.join(map(str, sizes))} "
            f"samples), give {mean:.6g}."
        )
        if not _equal(mean * total / (total // count * count), value):
            return fault(message, *where)
        message += (
            f" Lightning divides by the mean number of samples per rank without its fraction ({total // count} instead "
            f"of {total / count:g}): {_ISSUE}."
        )
        proof = f"The sum of the logged values divided by {total} samples is {mean:.6g}, as on one process."
        return fault(message, *where, proof)
    if any(len(events) > 1 for events in logs):
        message += " The value of a batch depends on which samples are in it, so it is not a mean over samples."
        return depends(message, *where)
    return fault(f"{message} Each rank computes a value, and their mean is not the value of all samples.", *where)


def _samples(run: Run) -> Counter[str]:
    """Returns how often each sample was evaluated, by the digest of its tensors or by its index."""
    found: Counter[str] = Counter()
    for event in (event for record in run.ranks for event in record.of_kind("batch")):
        indices = [f"{event['loader']} {index}" for index in event["indices"]]
        found.update(indices or event.get("samples") or [f"{event['loader']}"] * event["size"])
    return found


def _logs(record: RankRecord, name: str) -> list[tuple[dict[str, Any], int]]:
    """Returns the events that log a metric, with their batch sizes."""
    found, size = [], 1
    for event in record.of_kind("batch", "log"):
        if event["kind"] == "batch":
            size = event["size"]
        elif event["name"] == name and event["value"] is not None:
            inside = event["place"].rpartition(" ")[2] not in {"on_validation_epoch_end", "on_validation_end"}
            found.append((event, event["batch_size"] or (size if inside else 1)))
    return found


def _mean(entries: list[tuple[dict[str, Any], int]]) -> float | None:
    total = sum(size for _, size in entries)
    if not total or any(event["reduce_fx"] != "mean" for event, _ in entries):
        return None
    return sum(float(event["value"]) * size for event, size in entries) / total


def _is_random(evidence: Evidence, right: dict[str, float]) -> bool:
    """Returns whether other random numbers change a metric."""
    # A metric such as an accuracy may be the same by chance.
    runs = (evidence.evaluate_again(draws) for draws in (1, 2))
    others = (run.ranks[0].metrics for run in runs if run.worked)
    return any(not _equal(other.get(name), value) for other in others for name, value in right.items())


def _equal(a: float | None, b: float) -> bool:
    return a is not None and (isclose(a, b, rel_tol=_SAME, abs_tol=1e-7) or (isnan(a) and isnan(b)))
