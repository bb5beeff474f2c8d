"""Samplers that are replaced on several ranks, and data sets that are split twice."""

from __future__ import annotations

from typing import NamedTuple

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import Event, contents, indices_known, training_epochs


def replaced_sampler(evidence: Evidence) -> tuple[Event, list[Event], set[int]] | None:
    """Returns the first epoch on one process and on the ranks, and the samples that the ranks lack.

    That is, if the user's own sampler is replaced on several ranks, and samples are lost.
    """
    single, epochs = evidence.single, training_epochs(evidence.ranks)
    if single is None or not single.training_epochs or not epochs:
        return None
    one, several = single.training_epochs[0], epochs[0]
    usual = {"RandomSampler", "SequentialSampler", None, *(event["sampler"] for event in several)}
    if one["sampler"] in usual or not indices_known([one]) or not indices_known(several):
        return None
    if len(set(one["indices"])) < len(one["indices"]):
        # It draws with replacement: the samples of an epoch are random.
        return None
    lost = set(one["indices"]) - {index for event in several for index in event["indices"]}
    batch = max(*one["sizes"], 1)
    return (one, several, lost) if len(lost) > batch * len(several) or len(lost) > len(one["indices"]) / 4 else None


class SplitTwice(NamedTuple):
    """An epoch in which each rank takes a part of its own part of the samples.

    Attributes:
        samples: Number of samples of one process.
        drawn: Number of samples that all ranks have in an epoch.
        event: The epoch on rank 0.
    """

    samples: int
    drawn: int
    event: Event


def split_twice(evidence: Evidence) -> SplitTwice | None:
    """Returns the first epoch if each rank has its own part of the samples, and its sampler divides this part again.

    The sizes say it: the parts have as many samples together as one process has, and a sampler takes one of N.
    """
    single, epochs, world_size = evidence.single, training_epochs(evidence.ranks), len(evidence.ranks)
    if single is None or not single.training_epochs or not epochs or world_size < 2:
        return None
    one, several = single.training_epochs[0], epochs[0]
    if not indices_known([one]) or not indices_known(several) or not one["samples"]:
        return None
    total, batch = one["samples"], max(*one["sizes"], 1)
    sizes, drawn = [event["samples"] or 0 for event in several], [len(set(event["indices"])) for event in several]
    split = abs(sum(sizes) - total) < world_size and max(sizes) < total and len(set(one["indices"])) > total - batch
    again = all(count <= size / world_size + batch for size, count in zip(sizes, drawn, strict=True))
    if not split or not again or sum(drawn) > 3 * total / 4:
        return None
    # An index beyond the size is that of a data set below a Subset.
    subset = any(max(event["indices"]) >= size for event, size in zip(several, sizes, strict=True))
    if contents(evidence.ranks, several[0]["base"]).same is not subset:
        return None
    return SplitTwice(total, sum(drawn), several[0])
