"""LD002: ranks train on the same samples."""

from __future__ import annotations

from ddp_doctor.evidence.communication import shards
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import loss_place
from ddp_doctor.evidence.order import (
    contents,
    divides_batches,
    indices_known,
    leak,
    names,
    training_epochs,
)
from ddp_doctor.evidence.requirements import communicating, training_indices, unmet
from ddp_doctor.faults.ld004_sampler_replaced import replaced_sampler
from ddp_doctor.findings import Finding, fault, not_applicable, unclear
from ddp_doctor.lazy import torch

CODE = "LD002"
TITLE = "Ranks train on the same samples"
CAUSE = """\
Each rank runs its own copy of the loader: without a distributed sampler, every rank goes through the whole data set, in
the same order with equal seeds. The shapes are right and the loss falls.
"""
WRONG = """\
loader = DataLoader(dataset, batch_size, shuffle=True)    # on each rank, over all samples
model = DistributedDataParallel(model)
"""
FIX = """\
Give the loader a sampler that splits the indices, and seed what each rank draws for itself by its number:
    loader = DataLoader(dataset, batch_size, sampler=DistributedSampler(dataset, shuffle=True))
"""
THREADS = ("NVlabs/LongLive#71", "PatrickHua/SimSiam#16")
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Counts the samples that several ranks have in one epoch; a few may be repeated to fill batches."""
    ranks = evidence.ranks
    if not training_epochs(ranks) and (found := _same_gradients(evidence) or _other_permutations(evidence)):
        return [found]
    for events in filter(indices_known, training_epochs(ranks)):
        lists = [event["indices"] for event in events]
        sets = [set(one) for one in lists]
        union, total, batch = set.union(*sets), sum(map(len, lists)), max(max(event["sizes"]) for event in events)
        whole = all(one == union for one in sets) and len(union) > 1
        replaces = total - sum(map(len, sets)) > batch
        # A sampler that draws with replacement gives equal sequences only from equal seeds.
        equal = replaces and all(one == lists[0] for one in lists)
        if (replaces and not equal) or (total - len(union) <= batch * len(events) and not whole):
            # A sampler with replacement, or samples that fill batches.
            continue
        same = contents(ranks, events[0]["base"]).same
        if same is False or leak(ranks) or replaced_sampler(evidence):
            continue
        if lists[0] == lists[-1] and divides_batches(evidence):
            continue
        message = (
            f"In epoch {events[0]['epoch']}, {names([rank.rank for rank in ranks])} draw {total} samples, of which "
            f"{len(union)} are different: the {events[0]['sampler']} does not divide the samples among the ranks."
        )
        where = {"step": events[0]["step"], "amount": f"{total - len(union)} repeated", "place": events[0]["place"]}
        if same is None:
            message += " It could not be seen whether an index means the same sample on each rank."
            return [unclear(message, **where)]
        return [fault(message, **where)]
    return unmet(evidence, training_indices, _known_contents)


def _same_gradients(evidence: Evidence) -> Finding | None:
    """Finds ranks whose own samples, which come from no loader, give equal gradients in several steps.

    Different samples give different gradients, before they are averaged, even if the weights are equal.
    """
    first, *others = evidence.ranks
    own = {name: value for name, value in first.tensors.items() if name.startswith("local/")}
    steps = {name.split("/")[1] for name, value in own.items() if value.count_nonzero()}
    pairs = ((value, rank.tensors.get(name, torch.empty(0))) for rank in others for name, value in own.items())
    if len(steps) < 2 or not others or shards(evidence) or not all(torch.equal(*pair) for pair in pairs):
        return None
    message = (
        f"In {len(steps)} steps, the gradients of {names([rank.rank for rank in evidence.ranks])} are bit-identical "
        "before they are averaged: each rank trains on the same samples."
    )
    return fault(message, int(min(steps)), amount=f"{len(own)} equal gradients", place=loss_place(evidence))


def _other_permutations(evidence: Evidence) -> Finding | None:
    """Finds ranks that take different places of a permutation, as if it were the same on each of them."""
    for events in zip(*(rank.of_kind("part of a permutation") for rank in evidence.ranks), strict=False):
        name = f"permutation/{events[0]['number']}"
        drawn = [rank.tensors[name] for rank in evidence.ranks if name in rank.tensors]
        if len(drawn) < len(events) or len({len(one) for one in drawn}) > 1:
            return None
        places = [range(*event["part"]) for event in events]
        divided = set().union(*places)
        if len(divided) < sum(map(len, places)) or 2 * len(divided) < len(drawn[0]):
            # The ranks take the same places, each of its own numbers.
            continue
        taken = [set(one[list(part)].tolist()) for one, part in zip(drawn, places, strict=True)]
        if shared := len(divided) - len(set().union(*taken)):
            message = (
                f"Each rank takes other places of a random permutation of {len(drawn[0])} samples, but the permutation "
                f"is not the same on all ranks: of the {len(divided)} that are taken, {shared} repeat another one. "
                "Draw it from a generator with the same seed on all ranks."
            )
            return fault(message, 0, "", f"{shared} of {len(divided)} samples", events[0]["place"])
    return None


def _known_contents(evidence: Evidence) -> Finding | None:
    """An index means the same sample on all ranks."""
    bases = {event["base"] for events in training_epochs(evidence.ranks) for event in events}
    if all(contents(evidence.ranks, base).same is False for base in bases):
        return not_applicable("Each rank has a data set of its own: the same index is another sample.")
    return None


NEEDS = (communicating,)
