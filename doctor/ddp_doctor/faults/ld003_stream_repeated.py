"""LD003: a stream repeats on ranks or workers."""

from __future__ import annotations

from collections import Counter

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, communicates, divides_batches, names, samples_of, training_epochs
from ddp_doctor.evidence.requirements import communicating, stream
from ddp_doctor.findings import Finding, fault
from ddp_doctor.records.run import RankRecord

CODE = "LD003"
TITLE = "A stream repeats on ranks or workers"
CAUSE = """\
An `IterableDataset` has no indices, so no sampler can split it. Each rank, and each worker of each rank,
iterates over a full copy unless `__iter__` selects a part. Each sample then occurs once per rank and worker
in an epoch. The loss falls as usual; only an epoch is too long.
"""
WRONG = """\
class Stream(IterableDataset):
    def __iter__(self):
        return read(self.path)    # all samples, in each worker of each rank
"""
FIX = """\
Select by rank and worker in `__iter__`:
    info = torch.utils.data.get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    yield from itertools.islice(samples, rank * workers + worker, None, ranks * workers)
With Hugging Face data sets, use `datasets.distributed.split_dataset_by_node`.
"""
THREADS = ("Lightning-AI/pytorch-lightning#15734", "huggingface/datasets#5360", "huggingface/datasets#3423")
STRUCTURAL = True
NEEDS = (communicating, stream)
_FEWEST = 4
# The part of a stream that must be different samples, so that a repeated one says something.
_DISTINCT = 0.9
_TIMES_REPEATED = 4


def check(evidence: Evidence) -> list[Finding]:
    """Compares the samples of the streams by their contents."""
    for events in training_epochs(evidence.ranks):
        if all(event["iterable"] for event in events) and communicates(evidence):
            return _among_ranks(evidence, events) or _among_workers(evidence, events)
    return []


def _among_ranks(evidence: Evidence, events: list[Event]) -> list[Finding]:
    samples = [
        samples_of(rank, event) if event["workers"] else _first_pass(samples_of(rank, event))
        for rank, event in zip(evidence.ranks, events, strict=True)
    ]
    for place, first in enumerate(samples):
        for other, second in enumerate(samples[place + 1 :], place + 1):
            sets, lists, copies = [set(first), set(second)], [first, second], max(1, events[place]["workers"])
            distinct = all(len(a) >= _DISTINCT * len(b) / copies for a, b in zip(sets, lists, strict=True))
            least, shared = min(map(len, sets)), len(sets[0] & sets[1])
            # Samples that a rank has twice by itself may also be those of another rank.
            repeated = max(len(b) / copies - len(a) for a, b in zip(sets, lists, strict=True))
            if least < _FEWEST or not distinct or shared <= max(least / 4, _TIMES_REPEATED * repeated):
                continue
            if first == second and divides_batches(evidence):
                continue
            order = "in the same order" if first == second else "in another order"
            workers = " and their workers" if events[0]["workers"] > 1 and 2 * shared <= least * 1.5 else ""
            message = (
                f"{names([place, other]).capitalize()} read the same {shared} samples of {least} from the "
                f"{events[0]['dataset']}, {order}: the stream is not divided among the ranks{workers}."
            )
            amount = f"{shared} of {least} samples on both ranks"
            return [fault(message, events[0]["step"], "", amount, events[0]["place"])]
    return []


def _first_pass(samples: list[str]) -> list[str]:
    """Returns the samples before the first repeated one: an endless stream comes to them again."""
    seen = set[str]()
    for number, sample in enumerate(samples):
        if sample in seen:
            return samples[:number] if number >= _FEWEST else samples
        seen.add(sample)
    return samples


def _among_workers(evidence: Evidence, events: list[Event]) -> list[Finding]:
    for rank, event in zip(evidence.ranks, events, strict=True):
        found = _copies(rank, event)
        if event["workers"] < 2 or found != event["workers"]:
            continue
        run = evidence.run("no workers", interventions={"no_workers": True})
        epochs = run.ranks[rank.rank].training_epochs if run.worked else []
        if not epochs or _copies(run.ranks[rank.rank], epochs[0]) != 1:
            return []
        message = (
            f"Rank {rank.rank} gets each of {len(set(samples_of(rank, event)))} samples of the {event['dataset']} "
            f"{found} times in one epoch: each of its {event['workers']} workers reads the same samples."
        )
        proof = "without workers each sample comes once"
        return [fault(message, event["step"], "", f"each sample {found} times", event["place"], proof)]
    return []


def _copies(rank: RankRecord, event: Event) -> int:
    """Returns how often almost every sample comes in an epoch; 0 if the numbers differ."""
    counts = Counter(samples_of(rank, event))
    most, number = next(iter(Counter(counts.values()).most_common(1)), (0, 0))
    return most if len(counts) >= _FEWEST and number >= _DISTINCT * len(counts) else 0
