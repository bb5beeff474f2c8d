"""Evaluation metrics of any program: the numbers that rank 0 reports, with weights that do not change.

The optimizers do nothing in these runs, so that several ranks and one process evaluate the same weights. A number that
changes with the samples of the evaluation, and that a repeated run reports again, is a metric: a time is none. If the
samples of the other ranks do not change it, it is that of rank 0 alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isclose
from typing import Any

from ddp_doctor.evidence.decisions import deciding_numbers
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.reported_numbers import Key, Number, numbers_of
from ddp_doctor.probes.reports import BRACKETED
from ddp_doctor.records.run import RankRecord, Run

# Relative: what the order of additions changes.
_SAME = 1e-4
# The two ways in which samples are changed: a network that is not trained may put all of them into one class, unless
# they are large.
_FACTORS = (0.5, -8.0)
# A metric of these values may be the same for all samples, so that it is computed again with up to so many weights.
_EXTREME, _MOST_WEIGHTS = {0.0, 1.0}, 3
# Relative: by so much, another checkpoint may be the best one.
LARGE = 0.01
# Relative: a number that is printed in 32 bits is that of a condition.
_READ = 1e-6


@dataclass(frozen=True)
class Metric:
    """A metric that differs between one process and several ranks with the same weights.

    Attributes:
        name: The word before it in the report, or empty.
        value: What rank 0 reports.
        alone: What one process reports.
        own: Whether the samples of the other ranks do not change it.
        place: The user's place of the report.
        step: The step after which it is reported.
        decides: Whether a callback or a condition of the code decides by it.
    """

    name: str
    value: float
    alone: float
    own: bool
    place: str
    step: int
    decides: bool

    @property
    def difference(self) -> float:
        """The relative difference."""
        return abs(self.value - self.alone) / (abs(self.alone) or 1.0)

    def is_scaled(self, ranks: int) -> bool:
        """Returns whether the value is that of one process times, or divided by, the number of ranks."""
        ratio = self.value / self.alone if self.alone else 0.0
        return isclose(ratio, ranks, rel_tol=0.02) or isclose(ratio, 1 / ranks, rel_tol=0.02)


def wrong_metrics(evidence: Evidence) -> tuple[Sequence[Metric], str]:
    """Returns the metrics that differ, and why they cannot be compared, if so.

    Metrics by which something is decided are also compared with other weights if they differ by little.
    """
    loaders = _divided_loaders(evidence.trained)
    if not loaders:
        return [], ""
    if not evidence.trained[0].of_kind("reported"):
        return [], "Rank 0 prints or logs no number, so no metric was compared."
    still: dict[str, Any] = {"same_seed": True, "interventions": {"still": True}}
    one, several = evidence.run("still alone", world_size=1, **still), evidence.run("still", **still)
    if not one.worked or not several.worked:
        run = one if not one.worked else several
        return [], f"The metrics of unchanged weights were not compared: {run.short_reason}"
    if _weights(one.ranks[0], loaders) != _weights(several.ranks[0], loaders):
        return [], "The metrics were not compared: one process and rank 0 evaluate other weights."
    if len(part := _evaluated(one, loaders)) < len(whole := _evaluated(several, loaders)):
        return [], f"The metrics were not compared: one process evaluates {len(part)} of the {len(whole)} samples."
    alone, ours = numbers_of(one.ranks[0]), numbers_of(several.ranks[0])
    others = {key for rank in several.ranks[1:] for key in numbers_of(rank)}
    known = (ours.keys() & alone.keys()) - others
    differ = _differing(ours, alone, known)
    if differ:
        # A time, for example, differs between two runs of the same ranks as well.
        known &= _repeated(evidence)
        differ = [key for key in differ if key in known]
    # As `loss: 0.52 (0.61)`, the median of rank 0's last batches and the mean of all: the second one is the metric.
    right = {(*key[:2], key[2] - 1, ours[key][2].removesuffix(BRACKETED)) for key in known.difference(differ)}
    differ = [key for key in differ if (*key, ours[key][2]) not in right]
    if not differ:
        return _with_other_weights(evidence, [key for key in known if ours[key][0] in _EXTREME]), ""
    metrics = _perturbed(evidence, loaders, 0, {key: ours[key][0] for key in differ}, missing=False)
    by_others = _perturbed(evidence, loaders, 1, {key: ours[key][0] for key in metrics}, missing=True)
    decides = _deciding(evidence, metrics)
    found = [
        _metric(ours[key], alone[key], own=key not in by_others, decides=key in decides)
        for key in sorted(metrics, key=lambda key: (ours[key][4], key))
    ]
    small = {metric.name for metric in found if metric.decides and not metric.own and metric.difference <= LARGE}
    unclear = [key for key in metrics if ours[key][2] in small]
    return [*found, *_with_other_weights(evidence, unclear, LARGE)], ""


def monitored(evidence: Evidence) -> set[str]:
    """Returns the names of the metrics by which callbacks of a Trainer decide."""
    return {event["name"] for rank in evidence.trained for event in rank.of_kind("monitor")}


def _deciding(evidence: Evidence, known: Iterable[Key]) -> set[Key]:
    """Returns the numbers by which a callback decides, or that a deciding condition of the code reads."""
    names, numbers, read = monitored(evidence), numbers_of(evidence.trained[0]), deciding_numbers(evidence)

    def is_read(value: float, rounding: float) -> bool:
        # A report may be in percent.
        return any(
            abs(value - scale * number) <= max(rounding, scale * _READ * abs(number))
            for number in read
            for scale in (1.0, 100.0)
        )

    return {key for key in known if key in numbers and (numbers[key][2] in names or is_read(*numbers[key][:2]))}


def _metric(ours: Number, alone: Number, *, own: bool, decides: bool) -> Metric:
    value, _, name, place, step = ours
    return Metric(name, value, alone[0], own, place, step, decides)


def _differing(
    ours: dict[Key, Number], alone: dict[Key, Number], known: Iterable[Key], least: float = _SAME
) -> list[Key]:
    """Returns the numbers that differ by more than rounding and this part of their value, of those that both have."""
    return [
        key
        for key in known
        if key in ours
        and key in alone
        and abs(ours[key][0] - alone[key][0]) > max(ours[key][1], alone[key][1], least * abs(alone[key][0]))
    ]


def _with_other_weights(evidence: Evidence, known: Sequence[Key], least: float = _SAME) -> list[Metric]:
    """Compares metrics with other weights: a network that is not trained may put all samples into one class."""
    for number in range(_MOST_WEIGHTS if known else 0):
        name = f"still with other weights {number}"
        change: dict[str, Any] = {"same_seed": True, "interventions": {"still": True, "other_weights": number}}
        one = evidence.run(f"{name} alone", world_size=1, **change)
        alone = numbers_of(one.ranks[0]) if one.worked else {}
        if one.worked and all(alone[key][0] in _EXTREME for key in known if key in alone):
            # These weights show as little.
            continue
        several = evidence.run(name, **change)
        if not one.worked or not several.worked:
            break
        ours = numbers_of(several.ranks[0])
        if found := _differing(ours, alone, known, least):
            decides = _deciding(evidence, found)
            return [_metric(ours[key], alone[key], own=False, decides=key in decides) for key in found]
    return []


def _repeated(evidence: Evidence) -> set[Key]:
    """Returns the numbers of rank 0 that two runs report alike; all of them if the second run fails."""
    first = numbers_of(evidence.trained[0])
    again = evidence.again()
    if not again.worked:
        return set(first)
    second = numbers_of(again.ranks[0])
    return {key for key in first.keys() & second.keys() if abs(first[key][0] - second[key][0]) <= first[key][1]}


def _perturbed(
    evidence: Evidence, loaders: Sequence[int], first: int, values: dict[Key, float], *, missing: bool
) -> set[Key]:
    """Returns the numbers of rank 0 that change if the samples of the evaluation change on the ranks from `first` on.

    Args:
        evidence: The runs.
        loaders: The loaders of the evaluation.
        first: The first rank whose samples change.
        values: The numbers with the samples as they are.
        missing: Whether a number that is then not reported counts as changed.
    """
    found, known = set[Key](), False
    for factor in _FACTORS:
        if found == values.keys():
            break
        change = {"still": True, "perturb": [first, *loaders], "factor": factor}
        run = evidence.run(f"still, others from rank {first} ({factor})", same_seed=True, interventions=change)
        if run.worked:
            known, numbers = True, numbers_of(run.ranks[0])
            found |= {key for key in values if (numbers[key][0] != values[key] if key in numbers else missing)}
    # If such samples end the program, nothing is known.
    return found if known or not missing else set(values)


def _divided_loaders(ranks: Sequence[RankRecord]) -> list[int]:
    """Returns the loaders that are evaluated, and whose samples rank 0 does not have completely."""
    found = set()
    for event in ranks[0].evaluation_epochs if ranks else []:
        sets = [_samples(rank, event["loader"]) for rank in ranks]
        if set().union(*sets) - set(sets[0]):
            found.add(event["loader"])
    trained = {event["loader"] for rank in ranks for event in rank.training_epochs}
    return sorted(found - trained)


def _evaluated(run: Run, loaders: Sequence[int]) -> set[str]:
    """Returns the samples that the first evaluations with these loaders have on all ranks."""
    found = set[str]()
    for rank in run.ranks:
        first: dict[int, int] = {}
        for batch in rank.of_kind("batch"):
            loader, iteration = batch["loader"], batch["iteration"]
            if loader in loaders and first.setdefault(loader, iteration) == iteration:
                found.update(_names(batch))
    return found


def _samples(record: RankRecord, loader: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for batch in record.of_kind("batch"):
        if batch["loader"] == loader:
            found.update(_names(batch))
    return found


def _names(batch: dict[str, Any]) -> Iterable[str]:
    """Returns the digests of the samples of a batch, or their indices."""
    return batch.get("samples") or map(str, batch["indices"])


def _weights(record: RankRecord, loaders: Sequence[int]) -> list[str]:
    """Returns digests of the weights and buffers of the first evaluation."""
    batch = None
    for event in record.of_kind("batch", "forward"):
        if event["kind"] == "batch":
            batch = event
        elif batch is not None and batch["loader"] in loaders:
            return [event.get("weights", "")]
    return []
