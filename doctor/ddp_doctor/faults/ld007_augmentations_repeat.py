"""LD007: augmentations repeat."""

from __future__ import annotations

from itertools import combinations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, calls_of, epoch_of
from ddp_doctor.evidence.requirements import training_loader
from ddp_doctor.findings import Finding, cannot_tell, fault, not_reached
from ddp_doctor.records.run import RankRecord

CODE = "LD007"
TITLE = "Augmentations repeat"
CAUSE = """\
Workers start again in each epoch with a copy of the generators that the loader does not seed, such as one that the data
set created: they draw the same numbers in each worker or epoch. No metric shows the smaller variety of the data.
"""
WRONG = """\
class Images(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)    # each worker and epoch has a copy
"""
FIX = """\
Use the global generators, which the loader seeds for each worker and epoch, or seed your own there:
    def seed(worker_id):
        torch.utils.data.get_worker_info().dataset.rng = np.random.default_rng(torch.initial_seed())
    DataLoader(dataset, num_workers=4, worker_init_fn=seed)
"""
THREADS = ("pytorch/pytorch#5059", "Project-MONAI/MONAI#1068", "Lightning-AI/pytorch-lightning#20412")
STRUCTURAL = True
# A repeated sample says something if this many repetitions are that improbable.
_CHANCE = 1e-4


def check(evidence: Evidence) -> list[Finding]:
    """Compares the samples of two epochs, and the random numbers with which the workers begin."""
    found = (_workers(rank) or _epochs(rank) for rank in evidence.ranks)
    return [finding for finding in found if finding][:1]


def _workers(rank: RankRecord) -> Finding | None:
    begun: dict[tuple[int, str, str], tuple[Event, int]] = {}
    for event in rank.training_epochs:
        calls = calls_of(rank, event["base"])
        if calls is None or not calls["random"]:
            continue
        for worker, states in enumerate(event["worker_generators"]):
            for name in calls["generators"]:
                first, other = begun.setdefault((event["base"], name, states[name]), (event, worker))
                known = first["epoch"] != event["epoch"] or first["loader"] == event["loader"]
                if (first, other) != (event, worker) and known:
                    message = (
                        f"On rank {rank.rank}, worker {worker} begins epoch {event['epoch']} with the same random "
                        f"numbers of {name} as worker {other} began epoch {first['epoch']}, and the "
                        f"{event['dataset']} draws from them."
                    )
                    return fault(message, event["step"], place=event["place"])
    return None


def _epochs(rank: RankRecord) -> Finding | None:
    for first, second in combinations(rank.training_epochs, 2):
        calls = calls_of(rank, first["base"])
        if first["iterable"] or first["base"] != second["base"] or calls is None or not calls["random"]:
            continue
        one, two = (_by_index(rank, event) for event in (first, second))
        common = one.keys() & two.keys()
        same = all(one[index] == two[index] for index in common)
        if common and same and _chance(calls) ** len(common) < _CHANCE:
            message = (
                f"On rank {rank.rank}, all {len(common)} samples that are loaded in epochs {first['epoch']} and "
                f"{second['epoch']} are equal, although the {second['dataset']} is random when it is called directly."
            )
            return fault(message, second["step"], place=second["place"])
    return None


def _chance(calls: Event) -> float:
    """Returns how probable it is that a sample is the same twice, by the rule of succession."""
    tried = len(calls["samples"])
    return float((1 - calls["random"]) * tried + 1) / (tried + 2)


def _by_index(rank: RankRecord, event: Event) -> dict[int, str]:
    return {
        index: sample
        for batch in rank.of_kind("batch")
        if epoch_of(batch) == epoch_of(event) and len(batch["indices"]) == len(batch.get("samples", ()))
        for index, sample in zip(batch["indices"], batch["samples"], strict=True)
    }


def _random_data(evidence: Evidence) -> Finding | None:
    """A data set is random when it is called directly."""
    bases = {(rank.rank, event["base"]): rank for rank in evidence.ranks for event in rank.training_epochs}
    calls = [calls_of(rank, base) for (_, base), rank in bases.items()]
    if any(call and call["random"] for call in calls):
        return None
    if None in calls:
        return cannot_tell("The data set could not be called directly, so it is not known whether it is random.")
    return training_loader(evidence) or not_reached("No data set is random.")


NEEDS = (_random_data,)
