"""LD002: ranks train on the same samples."""

from __future__ import annotations

import torch

from ddp_doctor.evidence.communication import shards
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import loss_place
from ddp_doctor.evidence.order import (
    communicates,
    contents,
    divides_batches,
    indices_known,
    leak,
    names,
    training_epochs,
)
from ddp_doctor.evidence.requirements import communicating, training_indices
from ddp_doctor.faults.ld004_sampler_replaced import replaced_sampler
from ddp_doctor.findings import Finding, fault, not_applicable, unclear

CODE = "LD002"
TITLE = "Ranks train on the same samples"
CAUSE = """\
Each rank runs its own copy of the loader. Without a distributed sampler, every rank goes through the whole
data set: with equal seeds in the same order, and with different seeds in different orders that overlap. An
epoch then processes each sample once per rank, and some steps average a gradient with itself. Nothing fails,
because the shapes are right and the loss falls. Equal seeds have the same effect on samples that are drawn with
replacement, and on samples that the program generates.
"""
WRONG = """\
loader = DataLoader(dataset, batch_size, shuffle=True)    # on each rank, over all samples
model = DistributedDataParallel(model)
"""
FIX = """\
Give the loader a sampler that splits the indices:
    sampler = DistributedSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size, sampler=sampler)
"""
THREADS = ("NVlabs/LongLive#71", "PatrickHua/SimSiam#16")
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Counts the samples that several ranks have in one epoch; a few may be repeated to fill batches."""
    ranks = evidence.ranks
    if not communicates(evidence):
        return []
    if not training_epochs(ranks) and (found := _same_gradients(evidence) or _other_permutations(evidence)):
        return [found]
    for events in training_epochs(ranks):
        if not indices_known(events):
            continue
        sets, lists = [set(event["indices"]) for event in events], [event["indices"] for event in events]
        union = set.union(*sets)
        total, batch = sum(map(len, lists)), max(max(event["sizes"]) for event in events)
        own = sum(map(len, lists)) - sum(map(len, sets))
        whole = all(one == union for one in sets) and len(union) > 1
        # A sampler that draws with replacement gives equal sequences only from equal seeds.
        equal = own > batch and all(one == lists[0] for one in lists)
        if (own > batch and not equal) or (total - len(union) <= batch * len(events) and not whole):
            # A sampler with replacement, or samples that fill batches.
            continue
        same = contents(ranks, events[0]["base"]).same
        if same is False or leak(ranks) or replaced_sampler(evidence):
            continue
        if lists[0] == lists[-1] and divides_batches(evidence):
            continue
        if equal:
            drawn = f"draw the same {len(lists[0])} samples in the same order"
        elif whole:
            order = "in the same order" if all(one == lists[0] for one in lists) else "each in its own order"
            drawn = f"each train on all {len(union)} samples, {order}"
        else:
            drawn = f"draw {total} samples of which {total - len(union)} are repeated"
        message = (
            f"In epoch {events[0]['epoch']}, {names([rank.rank for rank in ranks])} {drawn}: the sampler is a "
            f"{events[0]['sampler']}, which does not divide the samples among the ranks."
        )
        values = {
            "step": events[0]["step"],
            "amount": f"{total} samples drawn, {len(union)} different ones",
            "place": events[0]["place"],
        }
        if same is None:
            message += " It could not be seen whether an index means the same sample on each rank."
            return [unclear(message, **values)]
        return [fault(message, **values)]
    return []


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
    which, place = names([rank.rank for rank in evidence.ranks]), loss_place(evidence)
    message = (
        f"In {len(steps)} steps, the gradients of {which} are bit-identical before they are averaged: each rank trains "
        "on the same samples. If the program draws them, seed each rank differently."
    )
    return fault(message, int(min(steps)), "", f"{len(own)} equal gradients", place)


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
        shared = len(divided) - len(set().union(*taken))
        if shared:
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


NEEDS = (communicating, training_indices, _known_contents)
