"""LD004: the sampler is replaced or split twice."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, contents, indices_known, names, training_epochs
from ddp_doctor.evidence.requirements import training_indices, unmet
from ddp_doctor.findings import Finding, cannot_tell, fault, not_reached

TITLE = "The sampler is replaced or split twice"
CAUSE = """\
A framework may replace the loader's sampler by a distributed one on several ranks, so that one that balances, weights
or selects samples is lost. Or it divides again what each rank has already split, and an epoch has one of N samples.
"""
WRONG = """\
loader = DataLoader(dataset, batch_size, sampler=WeightedRandomSampler(weights, len(dataset)))
Trainer(devices=2).fit(module, loader)    # a DistributedSampler takes its place
"""
FIX = """\
Split once: either in your own sampler, which the framework is told to keep, or in the framework:
    Trainer(use_distributed_sampler=False)
"""
_SHUFFLES = "Lightning-AI/pytorch-lightning#21447"
THREADS = ("Lightning-AI/pytorch-lightning#1995", "Lightning-AI/pytorch-lightning#9655", _SHUFFLES)
_USUAL = {"RandomSampler", "SequentialSampler", None}


def check(evidence: Evidence) -> list[Finding]:
    """Compares the sampler and its samples on one process and on the ranks."""
    found = (
        _too_many_parts(evidence) or replaced_sampler(evidence) or split_twice(evidence) or _shuffled_order(evidence)
    )
    return [found] if found else unmet(evidence, _own_sampler)


def _too_many_parts(evidence: Evidence) -> Finding | None:
    """Finds a sampler that divides the samples among more ranks than there are."""
    for events in training_epochs(evidence.ranks):
        parts, drawn = events[0].get("replicas", 0), {index for event in events for index in event["indices"]}
        total = events[0]["samples"] or 0
        if parts > len(evidence.ranks) and indices_known(events) and len(drawn) < total:
            message = f"The {events[0]['sampler']} divides the samples among {parts} ranks, but fewer train."
            return _finding(message, total - len(drawn), total, events[0])
    return None


def replaced_sampler(evidence: Evidence) -> Finding | None:
    """Finds a sampler of the user that is replaced on several ranks, so that samples are lost."""
    first = _first_epochs(evidence)
    if first is None:
        return None
    one, several = first
    alone, together = set(one["indices"]), {index for event in several for index in event["indices"]}
    lost, drawn = alone - together, len(one["indices"])
    # A sampler with replacement draws random samples in each epoch.
    if one["sampler"] in {*_USUAL, *(event["sampler"] for event in several)} or len(alone) < drawn:
        return None
    if len(lost) <= max(*one["sizes"], 1) * len(several) and len(lost) <= drawn / 4:
        return None
    kinds = f"a {one['sampler']} on one process and a {several[0]['sampler']} on {len(several)} ranks"
    message = f"The sampler is {kinds}: {len(lost)} of its samples are lost."
    return _finding(message, len(lost), len(alone), one)


def split_twice(evidence: Evidence) -> Finding | None:
    """Finds ranks that each have their own part of the samples, which their sampler divides again.

    The sizes say it: the parts have as many samples together as one process has, and a sampler takes one of N.
    """
    first, ranks = _first_epochs(evidence), len(evidence.ranks)
    if first is None or ranks < 2 or not first[0]["samples"]:
        return None
    one, several = first
    total, batch = one["samples"], max(*one["sizes"], 1)
    sizes, drawn = [event["samples"] or 0 for event in several], [len(set(event["indices"])) for event in several]
    split = abs(sum(sizes) - total) < ranks and max(sizes) < total and len(set(one["indices"])) > total - batch
    again = all(count <= size / ranks + batch for size, count in zip(sizes, drawn, strict=True))
    if not split or not again or sum(drawn) > 3 * total / 4:
        return None
    # An index beyond the size is that of a data set below a Subset.
    subset = any(max(event["indices"]) >= size for event, size in zip(several, sizes, strict=True))
    if contents(evidence.ranks, several[0]["base"]).same is not subset:
        return None
    message = f"Each of {names(range(ranks))} has its own part of the samples, which a sampler divides again."
    return _finding(message, total - sum(drawn), total, several[0])


def _shuffled_order(evidence: Evidence) -> Finding | None:
    """Finds a fixed order of the user's sampler, such as one by length, that Lightning shuffles on several ranks."""
    first = _first_epochs(evidence)
    if first is None or evidence.single is None or first[1][0]["sampler"] != "DistributedSamplerWrapper":
        return None
    one, several = first
    order = one["indices"]
    fixed = [event["indices"] for event in evidence.single.training_epochs[:2]] == [order, order]
    place = {index: number for number, index in enumerate(order)}
    # The last sample of a rank may be one that fills its epoch.
    orders = [[place.get(index, 0) for index in event["indices"][:-1]] for event in several]
    # In ascending order, a sampler only selects samples.
    if not fixed or order == sorted(order) or all(own == sorted(own) for own in orders):
        return None
    message = f"The {one['sampler']} has one order, which Lightning shuffles on several ranks, a known fault of it "
    return fault(f"{message}({_SHUFFLES}).", several[0]["step"], place=several[0]["place"] or one["place"])


def _first_epochs(evidence: Evidence) -> tuple[Event, list[Event]] | None:
    """Returns the first epoch on one process and on the ranks, if all their indices are known."""
    one = evidence.single.training_epochs[:1] if evidence.single else []
    several = training_epochs(evidence.ranks)[:1]
    known = one and several and indices_known(one) and indices_known(several[0])
    return (one[0], several[0]) if known else None


def _finding(message: str, lost: int, total: int, event: Event) -> Finding:
    return fault(message, event["step"], "", f"{lost} of {total} samples lost", event["place"])


def _own_sampler(evidence: Evidence) -> Finding | None:
    """The program has a sampler of its own on one process."""
    if evidence.single is None:
        return cannot_tell("The program did not run on one process, so its sampler there is not known.")
    if all(event["sampler"] in {*_USUAL, "DistributedSampler"} for event in evidence.single.training_epochs):
        return not_reached("The program has no sampler of its own.")
    return None


NEEDS = (training_indices,)
