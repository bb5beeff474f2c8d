"""LD001: every epoch has the same order."""

from __future__ import annotations

from itertools import pairwise

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, samples_of
from ddp_doctor.evidence.requirements import training_loader
from ddp_doctor.findings import Finding, fault, not_reached, unclear
from ddp_doctor.records.run import RankRecord

CODE = "LD001"
TITLE = "Every epoch has the same order"
CAUSE = """\
A `DistributedSampler` shuffles with its seed plus its epoch number. Without `set_epoch`, the number stays 0,
so every epoch has the same order and the same batches. The loss falls anyway, and one epoch alone looks well
shuffled. Lightning's Trainer calls `set_epoch` for samplers that it can reach; your own loop has to call
it.
"""
WRONG = """\
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size, sampler=sampler)
for epoch in range(epochs):
    for batch in loader:    # the same order in each epoch
"""
FIX = """\
Call `set_epoch` at the start of every epoch, before iterating over the loader:
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
Your own batch sampler needs the same method.
"""
THREADS = ("pytorch/pytorch#31771", "kan-bayashi/ParallelWaveGAN#177", "huggingface/transformers#4398")
STRUCTURAL = True
_FEWEST = 4


def check(evidence: Evidence) -> list[Finding]:
    """Compares the order of two epochs; `set_epoch` must change it."""
    for rank in evidence.ranks:
        pair = _same_order(rank)
        if pair is None:
            continue
        order, event = pair
        owner = event["set_epoch"][0]
        run = evidence.run("set_epoch", interventions={"set_epoch": True})
        if not run.worked or _same_order(run.ranks[rank.rank]) is not None:
            return []
        called = bool(rank.of_kind("set_epoch"))
        what = f"set_epoch of the {owner} gets the same number" if called else f"nothing calls set_epoch of the {owner}"
        first = ", ".join(str(index) for index in order[:4])
        known = f" (samples {first}, ...)" if not event["iterable"] else ""
        amount = f"{len(order)} of {len(order)} samples at the same place"
        if called and not evidence.spec.whole_epochs:
            # The code calls set_epoch, perhaps where its own epochs end, and these were shortened.
            whole = evidence.run("whole epochs", whole_epochs=True)
            if not whole.worked:
                told = f"Two shortened epochs have the same order, and with whole epochs {whole.short_reason}."
                return [unclear(told, event["step"], "", amount, event["place"])]
            if _same_order(whole.ranks[rank.rank]) is None:
                return []
        message = (
            f"Epoch {event['epoch']} has the {len(order)} samples of rank {rank.rank} in the same order as the epoch "
            f"before{known}: {what}."
        )
        return [
            fault(
                message,
                step=event["step"],
                amount=amount,
                place=event["place"],
                proof=f"with {owner}.set_epoch(epoch) before each epoch, the orders differ",
            )
        ]
    return []


def _same_order(rank: RankRecord) -> tuple[list[int] | list[str], Event] | None:
    """Returns the order of two successive epochs of the same data, if it is the same, and the later one."""
    epochs = rank.training_epochs
    for first, second in pairwise(epochs):
        same_data = all(first[key] == second[key] for key in ("base", "sampler", "dataset", "iterable"))
        if not same_data or not second["set_epoch"]:
            continue
        if second["iterable"]:
            orders: list[list[int] | list[str]] = [samples_of(rank, event) for event in (first, second)]
        elif first["drained"] and second["drained"]:
            orders = [first["indices"], second["indices"]]
        else:
            continue
        ascending = not second["iterable"] and orders[0] == sorted(orders[0])
        if orders[0] == orders[1] and len(set(orders[0])) >= _FEWEST and not ascending:
            return orders[0], second
    return None


def _second_epoch(evidence: Evidence) -> Finding | None:
    """A sampler or data set with set_epoch is iterated over a second time."""
    pairs = [pair for rank in evidence.ranks for pair in pairwise(rank.training_epochs)]
    if not any(first["base"] == second["base"] for first, second in pairs):
        return not_reached("No data set is trained on for a second epoch.")
    if not any(second["set_epoch"] for _, second in pairs):
        return not_reached("No sampler and no data set has set_epoch.")
    return None


NEEDS = (training_loader, _second_epoch)
