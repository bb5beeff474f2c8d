"""What several checks read from the order of the samples: epochs of all ranks, equal data sets, shared samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ddp_doctor.evidence.communication import own_models
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord

Event = dict[str, Any]


class Contents(NamedTuple):
    """Comparison of a data set on all ranks by direct calls with equal seeds.

    Attributes:
        same: Whether the same index means the same sample; None if that is not known.
        permuted: Whether the ranks have the same samples under other indices.
        different: Indices whose labels (or other values) differ although the sample is the same.
        calls: Number of indices that were compared.
    """

    same: bool | None = None
    permuted: bool = False
    different: Sequence[int] = ()
    calls: int = 0


def training_epochs(ranks: Sequence[RankRecord]) -> list[list[Event]]:
    """Returns the epochs of training that all ranks have and take batches of, each with its event on every rank."""
    own = [rank.training_epochs for rank in ranks]
    places = [{event["place"] for event in epochs} for epochs in own]
    if shared := set.intersection(*places) if places else set():
        # What one rank reads alone, such as images to show, is no epoch of all.
        own = [[event for event in epochs if event["place"] in shared] for epochs in own]
    found = zip(*own, strict=False)
    # A rank that takes none gets its samples from another one.
    return [list(events) for events in found if all(event.get("yielded", 1) for event in events)]


def evaluation_epochs(ranks: Sequence[RankRecord]) -> list[list[Event]]:
    """Returns the epochs of evaluation that all ranks have, each with its event on every rank."""
    return _of_all([rank.evaluation_epochs for rank in ranks])


def predictions(ranks: Sequence[RankRecord]) -> list[list[Event]]:
    """Returns the epochs in which a Trainer predicts on all ranks, each with its event on every rank."""
    return _of_all([[event for event in rank.of_kind("epoch") if event.get("predicts")] for rank in ranks])


def _of_all(epochs: Sequence[Sequence[Event]]) -> list[list[Event]]:
    found = []
    for event in epochs[0] if epochs else []:
        others = [[e for e in own if epoch_of(e) == epoch_of(event)] for own in epochs[1:]]
        if all(others):
            found.append([event, *(other[0] for other in others)])
    return found


def indices_known(events: Sequence[Event]) -> bool:
    """Returns whether all indices of the epoch are known on all ranks, and belong to data sets of equal size."""
    known = all(event["drained"] and not event["iterable"] and event["indices"] for event in events)
    return known and len({event["base"] for event in events}) == 1


def epoch_of(event: Event) -> tuple[int, int]:
    """Returns the number of the loader, and that of its iteration."""
    return event["loader"], event["iteration"]


def samples_of(record: RankRecord, event: Event) -> list[str]:
    """Returns the digests of the samples that were loaded in an epoch."""
    batches = [batch for batch in record.of_kind("batch") if epoch_of(batch) == epoch_of(event)]
    return [sample for batch in batches for sample in batch.get("samples", ()) if sample]


def first_pass(samples: Sequence[str]) -> Sequence[str]:
    """Returns the samples before the first repeated one: an endless stream comes to them again."""
    repeated = (number for number, sample in enumerate(samples) if sample in samples[:number])
    return samples[: next(repeated, len(samples))]


def calls_of(record: RankRecord, base: int) -> Event | None:
    """Returns what direct calls of a data set gave, if that is known."""
    return next((event for event in record.of_kind("calls") if event["base"] == base), None)


def contents(ranks: Sequence[RankRecord], base: int) -> Contents:
    """Compares a data set on the first rank with that on the others."""
    calls = [call for rank in ranks if (call := calls_of(rank, base))]
    samples = [call["samples"] for call in calls]
    shared = [index for index in (samples or [{}])[0] if all(index in other for other in samples)]
    if len(calls) < len(ranks) or len({call["dataset"] for call in calls}) > 1 or len(shared) < 2:
        return Contents()
    leaves = range(min(len(other[index]) for other in samples for index in shared))
    columns = [[[other[index][leaf] for index in shared] for other in samples] for leaf in leaves]
    # A value that most samples share, such as a label, does not identify a sample.
    identifying = [leaf for leaf in leaves if _identifies(columns[leaf][0])]
    if not identifying:
        return Contents()
    if not all(column == columns[leaf][0] for leaf in identifying for column in columns[leaf]):
        sets = [set(column) for column in columns[identifying[0]]]
        permuted = any(len(first & second) > len(first) / 2 for first, second in combinations(sets, 2))
        return Contents(False, permuted, calls=len(shared))
    others = [leaf for leaf in leaves if leaf not in identifying and all(all(c) for c in columns[leaf])]
    rows = [row for row in range(len(shared)) if any(len({c[row] for c in columns[leaf]}) > 1 for leaf in others)]
    return Contents(True, different=[int(shared[row]) for row in rows], calls=len(shared))


def _identifies(column: list[str]) -> bool:
    return all(column) and len(set(column)) > len(column) / 2


def divides_batches(evidence: Evidence) -> bool:
    """Returns whether each rank takes its own part of equal batches by itself, as different gradients show."""
    ranks: Sequence[RankRecord] = evidence.ranks
    if any(_first_batch(rank).get("drawn") for rank in ranks):
        # Dropout makes the gradients differ, too, unless all ranks have one seed.
        run = evidence.run("equal draws", interventions={"seeds": True})
        ranks = run.ranks if run.worked else ranks
    first = [_first_batch(rank) for rank in ranks]
    random = any(batch.get("drawn") for batch in first) and len({batch["generators"]["torch"] for batch in first}) > 1
    if random or any(batch.get("samples") != first[0].get("samples") for batch in first):
        return False
    names = [name for name in ranks[0].tensors if name.startswith("local/0/")]
    pairs = [
        (ranks[0].tensors[name], rank.tensors[name]) for rank in ranks[1:] for name in names if name in rank.tensors
    ]
    return any(not torch.allclose(one, other, rtol=1e-3, atol=1e-7) for one, other in pairs)


def _first_batch(rank: RankRecord) -> Event:
    return next((batch for batch in rank.of_kind("batch") if batch["trains"]), {})


def select_differently(events: Sequence[Event]) -> bool:
    """Returns whether samplers divide the positions of other selections: the same position is another sample."""
    return len({event.get("divided") for event in events}) > 1


def repeated_samples(events: Sequence[Event]) -> int:
    """Returns how many samples of an evaluation come too often, if the samples are divided among the ranks."""
    if not indices_known(events) or select_differently(events):
        return 0
    lists = [event["indices"] for event in events]
    union, batch = {index for one in lists for index in one}, max(max(event["sizes"]) for event in events)
    extra = sum(map(len, lists)) - len(union)
    # Otherwise, each rank evaluates all samples, or draws them with replacement.
    return extra if extra <= batch * len(events) and any(set(one) != union for one in lists) else 0


def communicates(evidence: Evidence) -> bool:
    """Returns whether the ranks train one model, unlike independent runs."""
    # The collectives of sharded parameters are not seen.
    sharded = any(event.get("sharded") for rank in evidence.ranks for event in rank.of_kind("step"))
    # Of a rank that was killed, the journal is known alone.
    seen = (event["kind"] for rank in evidence.ranks for event in (*rank.events, *rank.journal))
    return sharded or (any(kind in {"ddp", "collective"} for kind in seen) and not own_models(evidence))


def names(ranks: Sequence[int]) -> str:
    """Returns such as `ranks 0 and 1`."""
    *first, last = map(str, ranks)
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"


class Leak(NamedTuple):
    """One rank trains with some (`shared`) of the samples with which another one validates (`of`), in an epoch."""

    trains: int
    validates: int
    shared: int
    of: int
    event: Event


def leak(ranks: Sequence[RankRecord]) -> Leak | None:
    """Returns the largest leak between two ranks, if no rank validates with its own training samples."""
    found: list[Leak] = []
    # The indices say it exactly if both are parts of one data set, otherwise the contents do.
    for samples, fewest, part in ((_keys, 1, 0.0), (_digests, 3, 0.05)):
        trained = [[event for event in rank.training_epochs if not event["iterable"]] for rank in ranks]
        training = [
            set[Any]().union(*(samples(ranks, rank, event) for event in events))
            for rank, events in zip(ranks, trained, strict=True)
        ]
        for number, rank in enumerate(ranks):
            for event in (event for event in rank.evaluation_epochs if not event["iterable"]):
                own = samples(ranks, rank, event)
                if len(own) < 2:
                    continue
                if own & training[number]:
                    # Perhaps the accuracy of the training samples.
                    return None
                for other, theirs in zip(ranks, training, strict=True):
                    if (shared := len(own & theirs)) >= max(fewest, part * len(own)):
                        found.append(Leak(other.rank, rank.rank, shared, len(own), event))
    return max(found, key=lambda one: one.shared, default=None)


def _keys(ranks: Sequence[RankRecord], _: RankRecord, event: Event) -> set[Any]:
    """Returns the samples of an epoch as (data set, index), if an index means the same sample on all ranks."""
    known = event["drained"] and contents(ranks, event["base"]).same is True
    return {(event["base"], index) for index in event["indices"]} if known else set()


def _digests(_: Sequence[RankRecord], rank: RankRecord, event: Event) -> set[Any]:
    return set(samples_of(rank, event))
