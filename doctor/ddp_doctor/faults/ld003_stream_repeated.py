"""LD003: a stream repeats on ranks or workers."""

from collections import Counter
from itertools import combinations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, divides_batches, epoch_of, first_pass, names, samples_of, training_epochs
from ddp_doctor.evidence.requirements import communicating, need, training_loader
from ddp_doctor.findings import Finding, fault, not_reached
from ddp_doctor.records.run import RankRecord

TITLE = "A stream repeats on ranks or workers"
CAUSE = """\
An `IterableDataset` has no indices, so no sampler can split it: each worker of each rank iterates over a full copy
unless `__iter__` selects a part. The loss falls as usual; only an epoch is too long.
"""
WRONG = """\
class Stream(IterableDataset):
    def __iter__(self):
        return read(self.path)    # all samples, in each worker of each rank
"""
FIX = """\
Select by rank and worker in `__iter__`, or use `datasets.distributed.split_dataset_by_node` of Hugging Face:
    info = torch.utils.data.get_worker_info()
    worker, workers = (info.id, info.num_workers) if info else (0, 1)
    yield from itertools.islice(samples, rank * workers + worker, None, world_size * workers)
"""
THREADS = ("Lightning-AI/pytorch-lightning#15734", "huggingface/datasets#5360", "huggingface/datasets#3423")
NEEDS = (
    communicating,
    need(
        lambda evidence: any(event["iterable"] for rank in evidence.ranks for event in rank.training_epochs),
        not_reached("No IterableDataset is trained on."),
        training_loader,
    ),
)
_FEWEST = 4
# The part of a stream that must be different samples, so that a repeated one says something.
_DISTINCT = 0.9
_TIMES_REPEATED = 4


def check(evidence: Evidence) -> list[Finding]:
    """Compares the samples of the streams by their contents."""
    for events in training_epochs(evidence.ranks):
        if all(event["iterable"] for event in events):
            return _among_ranks(evidence, events) or _among_workers(evidence, events)
    return []


def _among_ranks(evidence: Evidence, events: list[Event]) -> list[Finding]:
    samples = [samples_of(rank, event) for rank, event in zip(evidence.ranks, events, strict=True)]
    if not events[0]["workers"]:
        samples = [[*found] if len(found := first_pass(own)) >= _FEWEST else own for own in samples]
    for pair in combinations(range(len(samples)), 2):
        lists, copies = [samples[rank] for rank in pair], max(1, events[pair[0]]["workers"])
        sets = [set(one) for one in lists]
        distinct = all(len(a) >= _DISTINCT * len(b) / copies for a, b in zip(sets, lists, strict=True))
        least, shared = min(map(len, sets)), len(sets[0] & sets[1])
        # Samples that a rank has twice by itself may also be those of another rank.
        repeated = max(len(b) / copies - len(a) for a, b in zip(sets, lists, strict=True))
        if least < _FEWEST or not distinct or shared <= max(least / 4, _TIMES_REPEATED * repeated):
            continue
        if lists[0] == lists[1] and divides_batches(evidence):
            continue
        common = f"{shared} of {least} samples"
        message = f"{names(pair).capitalize()} read {common} of the {events[0]['dataset']} alike: nothing divides it."
        return [fault(message, events[0]["step"], "", common, events[0]["place"])]
    return []


def _among_workers(evidence: Evidence, events: list[Event]) -> list[Finding]:
    for rank, event in zip(evidence.ranks, events, strict=True):
        found = _copies(rank, event)
        if event["workers"] < 2 or found != event["workers"]:
            continue
        run = evidence.run("no workers", interventions={"no_workers": True})
        epochs = run.ranks[rank.rank].training_epochs if run.worked else []
        if not epochs or _copies(run.ranks[rank.rank], epochs[0]) != 1:
            return []
        message = f"Rank {rank.rank} gets each sample of the {event['dataset']} {found} times: once from each worker."
        return [fault(message, event["step"], place=event["place"], proof="without workers each sample comes once")]
    return []


def _copies(rank: RankRecord, event: Event) -> int:
    """Returns how often almost every sample comes in an epoch; 0 if the numbers differ."""
    batches = [batch for batch in rank.of_kind("batch") if epoch_of(batch) == epoch_of(event)]
    # The workers take turns, and the program may end before each of them has had its last one.
    batches = batches[: len(batches) - len(batches) % max(1, event["workers"])]
    counts = Counter(sample for batch in batches for sample in batch.get("samples", ()) if sample)
    most, number = next(iter(Counter(counts.values()).most_common(1)), (0, 0))
    return most if len(counts) >= _FEWEST and number >= _DISTINCT * len(counts) else 0
