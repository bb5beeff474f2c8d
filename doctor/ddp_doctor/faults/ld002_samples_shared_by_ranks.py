"""LD002: ranks train on the same samples."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import contents, divides_batches, first_pass, indices_known, leak, training_epochs
from ddp_doctor.evidence.requirements import communicating, need, training_indices, unmet
from ddp_doctor.faults.ld004_sampler_replaced import replaced_sampler
from ddp_doctor.findings import Finding, fault, not_applicable, unclear

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
# So many calls of a model without a repeated sample show that a rank takes each of them once.
_CALLS = 4


def check(evidence: Evidence) -> list[Finding]:
    """Counts the samples that several ranks have in one epoch; a few may be repeated to fill batches."""
    ranks = evidence.ranks
    if not training_epochs(ranks) and (found := _same_rows(evidence)):
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
        drawn = f"{total} samples, of which {len(union)} are different"
        message = f"The ranks draw {drawn}: the {events[0]['sampler']} does not divide them among the ranks."
        where = {"step": events[0]["step"], "amount": f"{total - len(union)} repeated", "place": events[0]["place"]}
        if same is None:
            message += " It could not be seen whether an index means the same sample on each rank."
            return [unclear(message, **where)]
        return [fault(message, **where)]
    return unmet(evidence, training_indices, _common_data)


def _same_rows(evidence: Evidence) -> Finding | None:
    """Finds models that get each sample once on a rank, and many of them on other ranks as well."""
    calls = [[event for event in rank.of_kind("forward") if event.get("rows")] for rank in evidence.ranks]
    rows = [first_pass([row for event in own for row in event["rows"]]) for own in calls]
    # What is drawn with replacement comes again on one rank as well, and constants come in each step.
    if any(len(one) < _CALLS * len(own[0]["rows"]) if own else True for one, own in zip(rows, calls, strict=True)):
        return None
    shared, least = len(set(rows[0]).intersection(*rows[1:])), min(map(len, rows))
    if shared <= least / 4 or (rows[0] == rows[-1] and divides_batches(evidence)):
        return None
    message = f"Ranks share {shared} of {least} samples: nothing divides them, or each draws a permutation of its own."
    return fault(message, 0, amount=f"{shared} of {least} samples", place=calls[0][0]["place"])


def _has_common_data(evidence: Evidence) -> bool:
    bases = {event["base"] for events in training_epochs(evidence.ranks) for event in events}
    return any(contents(evidence.ranks, base).same is not False for base in bases)


_OWN_DATA = not_applicable("Each rank has a data set of its own: the same index is another sample.")
_common_data = need(_has_common_data, _OWN_DATA)
NEEDS = (communicating,)
