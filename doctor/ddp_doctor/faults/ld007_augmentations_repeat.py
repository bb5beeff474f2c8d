"""LD007: augmentations repeat."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, calls_of
from ddp_doctor.evidence.requirements import need, training_loader
from ddp_doctor.findings import Finding, cannot_tell, fault, not_reached
from ddp_doctor.records.run import RankRecord

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


def check(evidence: Evidence) -> list[Finding]:
    """Compares the random numbers with which the workers of all epochs begin."""
    return [found for rank in evidence.ranks if (found := _workers(rank))][:1]


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
                    begins = f"worker {worker} of rank {rank.rank} begins epoch {event['epoch']}"
                    again = f"worker {other} began epoch {first['epoch']}"
                    message = f"As {again}, {begins} with the same random numbers of {name}, which its data draw."
                    return fault(message, event["step"], place=event["place"])
    return None


def _random_data(evidence: Evidence) -> Finding | None:
    """A data set is random when it is called directly."""
    calls = [calls_of(rank, event["base"]) for rank in evidence.ranks for event in rank.training_epochs]
    if any(call and call["random"] for call in calls):
        return None
    if None in calls:
        return cannot_tell("The data set could not be called directly, so it is not known whether it is random.")
    return training_loader(evidence) or not_reached("No data set is random.")


_workers_load = need(
    lambda evidence: any(event["workers"] for rank in evidence.ranks for event in rank.training_epochs),
    not_reached("No loader that is trained on has workers."),
)
NEEDS = (_random_data, _workers_load)
