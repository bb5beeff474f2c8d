"""LD024: a metric is averaged incorrectly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import isclose
from typing import Any, NamedTuple

from ddp_doctor.evidence.decisions import deciding_numbers
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import evaluation_epochs, repeated_samples, select_differently
from ddp_doctor.faults.ld027_collective_on_one_rank import mixed_keys
from ddp_doctor.findings import Finding, cannot_tell, depends, fault, not_reached, note
from ddp_doctor.records.run import RankRecord
from ddp_doctor.records.spec import BRACKETED, logged_name

# A reported number: its place in the program, how often it has reported before, and the position within the report.
Key = tuple[str, int, int]

TITLE = "A metric is averaged incorrectly"
CAUSE = """\
The mean of the ranks' means is the global mean only for equal numbers of samples, and the mean of an F1 score over
batches is not the score at all. `self.log(..., sync_dist=True)` averages the ranks, and rounds the number of samples.
"""
WRONG = """\
accuracy = (logits.argmax(1) == labels).float().mean()
dist.all_reduce(accuracy)
accuracy /= world_size    # the mean of means over unequal numbers of samples
"""
FIX = """\
Combine the sums and counts of all ranks before you divide, or log the metric object of torchmetrics, not its value:
    dist.all_reduce(correct)
    dist.all_reduce(count)
    accuracy = correct / count
"""
THREADS = ("Lightning-AI/pytorch-lightning#12354", "Lightning-AI/pytorch-lightning#21859")
NUMERIC = True
# Relative; metrics are computed in 32 bits.
_SAME = 1e-4
_ISSUE = "Lightning-AI/pytorch-lightning#21859"
# A metric of these values may be the same for all samples, so that it is computed again with up to so many weights.
_EXTREME, _MOST_WEIGHTS = {0.0, 1.0}, 3
# Relative: by so much, another checkpoint may be the best one.
_LARGE = 0.01
# Relative: a number that is printed in 32 bits is that of a condition.
_READ = 1e-6
# Training epochs that are examined.
_EPOCHS = 2
# The ways in which samples are changed: a network that is not trained may put small ones into one class.
_FACTORS = (-8.0, 0.5)


def check(evidence: Evidence) -> list[Finding]:
    """Compares the numbers that rank 0 alone reports of an evaluation with unchanged weights."""
    ranks, epochs = len(evidence.ranks), evaluation_epochs(evidence.ranks)
    if not any(rank.evaluation_epochs for rank in evidence.ranks):
        return [not_reached("There is no validation.")] if evidence.trained else []
    if any(map(select_differently, epochs)):
        return [cannot_tell("The ranks divide different selections of the samples (LD005), so no metric was compared.")]
    if mixed_keys(evidence.ranks):
        return [cannot_tell("The ranks log other keys (LD027), so no metric was compared.")]
    found, cannot = wrong_metrics(evidence)
    if any(map(repeated_samples, epochs)):
        # They explain other differences: LD023.
        found, cannot = [metric for metric in found if metric.own or metric.is_scaled(ranks)], ""
    if not found:
        return [cannot_tell(cannot)] if cannot else []
    metric = max(found, key=lambda metric: (metric.own, metric.decides and metric.difference > _LARGE))
    number = metric.number
    if metric.own and _only_logged(evidence, number.name):
        verdict, how = note, "It is that of rank 0's samples, is logged without sync_dist, and no callback monitors it."
    elif metric.own:
        verdict, how = fault, "It is that of the samples of rank 0: the other ranks do not change it."
    elif metric.is_scaled(ranks):
        verdict, how = fault, "The ranks' values are summed, or divided by their number once more."
    elif how := _logged(evidence, metric):
        verdict = fault
    elif metric.difference > _LARGE and metric.decides:
        verdict, how = fault, "It is not combined as over all samples at once, and a callback or a condition reads it."
    else:
        verdict, how = depends, "It is combined over the ranks, but not as over all samples at once."
    message = (
        f"The reported {number.name or 'metric'} of the same weights and samples is {number.value:.6g} on {ranks} "
        f"ranks and {metric.expected:.6g} on one process. {how}"
    )
    return [verdict(message, number.step, number.name, f"{metric.difference:.1e} of the value", number.place)]


def _only_logged(evidence: Evidence, name: str) -> bool:
    """Returns whether a Trainer logs a metric, as one of rank 0 by default, and no callback decides by it."""
    events = evidence.trained[0].of_kind("reported")
    logged = any(event["name"] == name and event.get("by_trainer") for event in events)
    return logged and not _monitored(evidence) & {name, logged_name(name)}


def _logged(evidence: Evidence, metric: Metric) -> str:
    """Returns what is wrong with the mean of what each rank logs once, or with Lightning's mean of right values."""
    logs = [_logs(rank, metric.number) for rank in evidence.runs["fixed weights"].ranks]
    entries = [entry for own in logs for entry in own]
    if not entries or any(event["value"] is None or event["reduce_fx"] != "mean" for event, _ in entries):
        return ""
    mean = sum(float(event["value"]) * size for event, size in entries) / sum(size for _, size in entries)
    if isclose(mean, metric.expected, rel_tol=_SAME):
        told = f"The module is right: the logged values, weighted by their batch sizes, give {mean:.6g}."
        return f"{told} Lightning 2.6.6 rounds the number of samples: {_ISSUE}."
    several = any(len(own) > 1 for own in logs)
    return "" if several else "The mean of the ranks' values is not the value of all samples."


def _logs(record: RankRecord, number: Number) -> list[tuple[dict[str, Any], int]]:
    """Returns the events that log a number in the validation that reports it, with their batch sizes."""
    found, size, name = [], 1, logged_name(number.name)
    for event in record.of_kind("batch", "log"):
        if event["kind"] == "batch":
            size = event["size"]
        elif event["name"] == name and event["step"] == number.step and not event["gradients"]:
            found.append((event, event["batch_size"] or size))
    return found


class Number(NamedTuple):
    """A number that rank 0 reports: its value and rounding, the word before it, the user's place, and the step."""

    value: float
    rounding: float
    name: str
    place: str
    step: int


class Metric(NamedTuple):
    """A number of rank 0 that differs between one process and several ranks with the same weights.

    Attributes:
        number: What rank 0 reports.
        expected: What one process reports.
        own: Whether the samples of the other ranks do not change it.
        decides: Whether a callback or a condition of the code decides by it.
    """

    number: Number
    expected: float
    own: bool
    decides: bool

    @property
    def difference(self) -> float:
        """The relative difference."""
        return abs(self.number.value - self.expected) / (abs(self.expected) or 1.0)

    def is_scaled(self, ranks: int) -> bool:
        """Returns whether the value is that of one process times, or divided by, the number of ranks."""
        ratio = self.number.value / self.expected if self.expected else 0.0
        return isclose(ratio, ranks, rel_tol=0.02) or isclose(ratio, 1 / ranks, rel_tol=0.02)


Numbers = dict[Key, Number]


def wrong_metrics(evidence: Evidence) -> tuple[Sequence[Metric], str]:
    """Returns the metrics that differ, and why they cannot be compared, if so.

    Metrics by which something is decided are also compared with other weights if they differ by little.
    """
    loaders = _divided_loaders(evidence.trained)
    if not loaders:
        return [], ""
    if not evidence.trained[0].of_kind("reported"):
        return [], "Rank 0 prints or logs no number, so no metric was compared."
    fixed: dict[str, Any] = {"same_seed": True, "interventions": {"still": True}}
    one = evidence.run("fixed weights on one process", world_size=1, **fixed)
    several = evidence.run("fixed weights", **fixed)
    if failed := [run.short_reason for run in (one, several) if not run.worked]:
        return [], f"The metrics of unchanged weights were not compared: {failed[0]}"
    weights = [set(_weights(run.ranks[0], loaders)) for run in (one, several)]
    # One process may call a part of the module that the ranks call.
    if not (weights[0] <= weights[1] or weights[1] <= weights[0]):
        return [], "The metrics were not compared: one process and rank 0 evaluate other weights."
    if len(_evaluated(one.ranks, loaders)) < len(_evaluated(several.ranks, loaders)):
        return [], "The metrics were not compared: one process does not evaluate all samples."
    alone, ours = _numbers(one.ranks[0]), _numbers(several.ranks[0])
    known = (ours.keys() & alone.keys()) - {key for rank in several.ranks[1:] for key in _numbers(rank)}
    if not known:
        return [], "Rank 0 alone reports no number that one process reports as well, so no metric was compared."
    differ = _differing(ours, alone, known)
    if differ:
        # A time, for example, differs between two runs of the same ranks as well.
        known &= _repeated(evidence)
    # As `loss: 0.52 (0.61)`, the median of rank 0's last batches and the mean of all: the second one is the metric.
    right = {(*key[:2], key[2] - 1, ours[key].name.removesuffix(BRACKETED)) for key in known.difference(differ)}
    differ = [key for key in differ if key in known and (*key, ours[key].name) not in right]
    if not differ:
        return _with_other_weights(evidence, [key for key in known if ours[key].value in _EXTREME]), ""
    # What the samples of the evaluation do not change is no metric.
    changed = _perturbed(evidence, loaders, 0, _FACTORS[0])
    metrics = {key for key in differ if key in changed and changed[key].value != ours[key].value}
    # Lightning reduces what it logs with sync_dist, also where the other samples happen to have as many right.
    own = {key for key in metrics if not any(event["sync_dist"] for event, _ in _logs(several.ranks[0], ours[key]))}
    for factor in _FACTORS:
        changed = _perturbed(evidence, loaders, 1, factor) if own else {}
        own = {key for key in own if key in changed and changed[key].value == ours[key].value}
    decides = _deciding(evidence, metrics)
    order = sorted(metrics, key=lambda key: (ours[key].step, key))
    found = {key: Metric(ours[key], alone[key].value, key in own, key in decides) for key in order}
    sure = [metric for metric in found.values() if metric.own or metric.is_scaled(len(several.ranks))]
    if len(sure) < len(found):
        if not _evaluated(several.ranks, loaders) <= _evaluated(one.ranks, loaders):
            return sure, "The ranks evaluate other samples than one process."
        draws: dict[str, Any] = {"still": True, "seeds": True}
        other = evidence.run("fixed weights, other draws", world_size=1, same_seed=True, interventions=draws)
        if not other.worked or _differing(alone, _numbers(other.ranks[0]), metrics):
            return sure, "The metrics depend on random numbers."
    unclear = [key for key in decides - own if found[key].difference <= _LARGE]
    return [*found.values(), *_with_other_weights(evidence, unclear, _LARGE)], ""


def _monitored(evidence: Evidence) -> set[str]:
    """Returns the names of the metrics by which callbacks of a Trainer decide."""
    return {event["name"] for rank in evidence.trained for event in rank.of_kind("monitor")}


def _deciding(evidence: Evidence, known: Iterable[Key]) -> set[Key]:
    """Returns the numbers by which a callback decides, or that a deciding condition of the code reads."""
    names, numbers, read = _monitored(evidence), _numbers(evidence.trained[0]), deciding_numbers(evidence)
    # A report may be in percent.
    scaled = [scale * value for value in read for scale in (1.0, 100.0)]

    def decides(number: Number) -> bool:
        near = (abs(number.value - value) <= max(number.rounding, _READ * abs(value)) for value in scaled)
        return number.name in names or any(near)

    return {key for key in known if key in numbers and decides(numbers[key])}


def _differing(ours: Numbers, alone: Numbers, known: Collection[Key], least: float = _SAME) -> list[Key]:
    """Returns the numbers that differ by more than rounding and this part of their value, of those that both have."""
    pairs = [(key, ours[key], alone[key]) for key in known if key in ours and key in alone]
    return [key for key, a, b in pairs if abs(a.value - b.value) > max(a.rounding, b.rounding, least * abs(b.value))]


def _with_other_weights(evidence: Evidence, known: Sequence[Key], least: float = _SAME) -> list[Metric]:
    """Compares metrics with other weights: a network that is not trained may put all samples into one class."""
    for number in range(_MOST_WEIGHTS if known else 0):
        name = f"other fixed weights {number}"
        change: dict[str, Any] = {"same_seed": True, "interventions": {"still": True, "other_weights": number}}
        one = evidence.run(f"{name} on one process", world_size=1, **change)
        alone = _numbers(one.ranks[0]) if one.worked else {}
        if one.worked and all(alone[key].value in _EXTREME for key in known if key in alone):
            # These weights show as little.
            continue
        several = evidence.run(name, **change)
        if not one.worked or not several.worked:
            break
        ours = _numbers(several.ranks[0])
        if found := _differing(ours, alone, known, least):
            decides = _deciding(evidence, found)
            return [Metric(ours[key], alone[key].value, False, key in decides) for key in found]
    return []


def _repeated(evidence: Evidence) -> set[Key]:
    """Returns the numbers of rank 0 that two runs report alike; all of them if the second run fails."""
    first, again = _numbers(evidence.trained[0]), evidence.again()
    second = _numbers(again.ranks[0]) if again.worked else first
    return {key for key in first if key in second and abs(first[key].value - second[key].value) <= first[key].rounding}


def _perturbed(evidence: Evidence, loaders: Sequence[int], first: int, factor: float) -> Numbers:
    """Returns the numbers of rank 0 if the samples of the evaluation change on the ranks from `first` on."""
    change = {"still": True, "perturb": [first, *loaders], "factor": factor}
    name = f"fixed weights, other samples from rank {first} on ({factor})"
    run = evidence.run(name, same_seed=True, interventions=change)
    return _numbers(run.ranks[0]) if run.worked else {}


def _divided_loaders(ranks: Sequence[RankRecord]) -> list[int]:
    """Returns the loaders that are evaluated, and whose samples rank 0 does not have completely."""
    found = {event["loader"] for rank in ranks[:1] for event in rank.evaluation_epochs}
    found -= {event["loader"] for rank in ranks for event in rank.training_epochs}
    return sorted(one for one in found if not _evaluated(ranks[1:], [one]) <= _evaluated(ranks[:1], [one]))


def _evaluated(ranks: Sequence[RankRecord], loaders: Sequence[int]) -> set[str]:
    """Returns the digests of the samples that these loaders have on these ranks, or their indices."""
    batches = (batch for rank in ranks for batch in rank.of_kind("batch") if batch["loader"] in loaders)
    return {name for batch in batches for name in batch.get("samples") or map(str, batch["indices"])}


def _weights(record: RankRecord, loaders: Sequence[int]) -> Sequence[str]:
    """Returns digests of the weights and buffers of the first evaluation."""
    evaluates = False
    for event in record.of_kind("batch", "forward"):
        if event["kind"] == "batch":
            evaluates = event["loader"] in loaders
        elif evaluates:
            return event.get("weights", ())
    return ()


def _numbers(record: RankRecord) -> Numbers:
    """Returns the reported numbers by place, time and position, apart from those of epochs after the examined ones.

    In those epochs, an evaluation has one batch on each rank, which are more samples on more ranks. A number that is
    reported between the batches of an evaluation shows its progress.
    """
    found, times, progress = Numbers(), Counter[str](), _progress(record)
    late = next((event["step"] for event in record.training_epochs[_EPOCHS : _EPOCHS + 1]), float("inf"))
    for event in record.of_kind("reported"):
        if event["step"] <= late and event["key"] not in progress:
            for position, (value, rounding, word) in enumerate(event["values"]):
                key = event["key"], times[event["key"]], position
                found[key] = Number(value, rounding, event["name"] or word, event["place"], event["step"])
            times[event["key"]] += 1
    return found


def _progress(record: RankRecord) -> set[str]:
    """Returns the places that report within the loop over the batches of an evaluation."""
    found, since, last = set[str](), set[str](), None
    for event in record.of_kind("batch", "stop", "reported"):
        if event["kind"] == "reported":
            since.add(event["key"])
            continue
        if last == (last := (event["loader"], event["iteration"], event["step"])) and not event["trains"]:
            found |= since
        since.clear()
    return found
