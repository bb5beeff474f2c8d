"""Which samples each rank trains on in the first steps of its epochs, as the page draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ddp_doctor.evidence.order import Event, contents, epoch_of, training_epochs
from ddp_doctor.findings import Batch
from ddp_doctor.records.run import RankRecord

# What one can look at.
_MOST_EPOCHS, _MOST_STEPS, _MOST_SAMPLES = 2, 3, 24


def first_batches(ranks: Sequence[RankRecord]) -> list[Batch]:
    """Returns the batches of the first steps of two epochs; none if the samples come from no DataLoader."""
    found = []
    for epoch, events in enumerate(training_epochs(ranks)[:_MOST_EPOCHS]):
        steps = [_steps(rank, event) for rank, event in zip(ranks, events, strict=True)]
        # The same index may mean another sample on each rank.
        own = not events[0]["iterable"] and contents(ranks, events[0]["base"]).same is False
        holders = Counter(sample for batches in steps for sample in {s for batch in batches.values() for s in batch})
        for number in sorted(set().union(*steps))[:_MOST_STEPS]:
            for rank, batches in zip(ranks, steps, strict=True):
                samples = batches.get(number, [])
                shown = samples[:_MOST_SAMPLES]
                shared = [] if own else [sample for sample in shown if holders[sample] > 1]
                found.append(Batch(number, epoch, rank.rank, len(samples), shown, shared))
    return found if any(batch.samples for batch in found) else []


def _steps(rank: RankRecord, epoch: Event) -> dict[int, list[str]]:
    """Returns the samples of each step: indices, or digests where there are none."""
    found: dict[int, list[str]] = {}
    for batch in rank.of_kind("batch"):
        if epoch_of(batch) == epoch_of(epoch):
            samples = [str(index) for index in batch["indices"]] or [text[:5] for text in batch.get("samples") or ()]
            found.setdefault(batch["step"], []).extend(samples)
    return found
