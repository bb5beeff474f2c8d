"""LD004: the sampler is replaced or split twice."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import indices_known, names, training_epochs
from ddp_doctor.evidence.requirements import training_indices
from ddp_doctor.evidence.samplers import replaced_sampler, split_twice
from ddp_doctor.findings import Finding, cannot_tell, fault, not_reached

CODE = "LD004"
TITLE = "The sampler is replaced or split twice"
CAUSE = """\
With several ranks, a framework may replace the loader's own sampler by a distributed one. A sampler that
balances classes, weights samples or selects a subset is then lost, and the model sees another distribution
than on one device. A data set that each rank has already split is also divided again, so that an epoch has one of N
samples; so has one that is divided among more ranks than train. Training continues without an error.
"""
WRONG = """\
sampler = WeightedRandomSampler(weights, len(dataset))
loader = DataLoader(dataset, batch_size, sampler=sampler)
Trainer(devices=2).fit(module, loader)    # a DistributedSampler takes its place
"""
FIX = """\
Split in your own sampler, and tell the framework to keep it:
    Trainer(use_distributed_sampler=False)
The sampler must then give each rank its own part of each epoch. Give a framework that splits the whole data set.
"""
THREADS = ("Lightning-AI/pytorch-lightning#1995", "Lightning-AI/pytorch-lightning#9655")
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Compares the sampler and its samples on one process and on the ranks."""
    if parts := _too_many_parts(evidence):
        return [parts]
    found = replaced_sampler(evidence)
    if found is None:
        return _split_twice(evidence)
    one, several, lost = found
    alone, together = len(set(one["indices"])), len({index for event in several for index in event["indices"]})
    examples = ", ".join(str(index) for index in sorted(lost)[:4])
    message = (
        f"On one process the sampler is a {one['sampler']}, which gives {alone} samples per epoch. On "
        f"{names(range(len(several)))} a {several[0]['sampler']} takes its place, which gives them {together} samples "
        f"together: {len(lost)} are never seen, such as {examples}."
    )
    return [fault(message, several[0]["step"], "", f"{len(lost)} of {alone} samples lost", one["place"])]


def _too_many_parts(evidence: Evidence) -> Finding | None:
    """Finds a sampler that divides the samples among more ranks than there are."""
    for events in training_epochs(evidence.ranks):
        parts, drawn = events[0].get("replicas", 0), {index for event in events for index in event["indices"]}
        if parts > len(evidence.ranks) and indices_known(events) and len(drawn) < (events[0]["samples"] or 0):
            total = events[0]["samples"]
            message = (
                f"The {events[0]['sampler']} divides the samples among {parts} ranks, but {len(evidence.ranks)} train: "
                f"an epoch has {len(drawn)} of {total} samples."
            )
            amount = f"{total - len(drawn)} of {total} samples lost"
            return fault(message, events[0]["step"], "", amount, events[0]["place"])
    return None


def _split_twice(evidence: Evidence) -> list[Finding]:
    """Finds ranks that each have a part of the samples as their own data set, which their sampler divides again."""
    found = split_twice(evidence)
    if found is None:
        return []
    samples, drawn, event = found
    message = (
        f"Each of {names(range(len(evidence.ranks)))} has its own part of the {samples} samples, and a "
        f"{event['sampler']} divides it again: an epoch of all ranks has {drawn} samples, and {samples - drawn} are "
        "not seen in it."
    )
    return [fault(message, event["step"], "", f"{samples - drawn} of {samples} samples lost", event["place"])]


def _own_sampler(evidence: Evidence) -> Finding | None:
    """The program has a sampler of its own on one process."""
    if evidence.single is None:
        return cannot_tell("The program did not run on one process, so its sampler there is not known.")
    usual = {"RandomSampler", "SequentialSampler", "DistributedSampler", None}
    if all(event["sampler"] in usual for event in evidence.single.training_epochs):
        return not_reached("The program has no sampler of its own.")
    return None


NEEDS = (training_indices, _own_sampler)
