"""Losses that are means over unequal numbers of labels, if one process cannot be given the samples of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddp_doctor.records.run import RankRecord

# Relative difference of the factors between the mean over labels and the loss.
_SAME_FACTOR = 1e-3
# The gradients of 32 bits are averaged, apart from a factor.
_SAME_DIRECTION = 1e-5


@dataclass(frozen=True)
class LabelCounts:
    """The numbers of labels of one optimizer step.

    Attributes:
        step: The step, from 0.
        counts: For each rank, the number of labels of each mean.
        place: Where the user's code computes the first one.
    """

    step: int
    counts: tuple[tuple[int, ...], ...]
    place: str

    @property
    def shares(self) -> list[float]:
        """How much the gradient of each rank has to count."""
        total = sum(map(sum, self.counts))
        return [sum(own) / total for own in self.counts]

    @property
    def excess(self) -> float:
        """The largest relative difference between the number of labels of a mean and that of the others."""
        known = [count for own in self.counts for count in own]
        return max(abs(count * len(known) / sum(known) - 1) for count in known)


def label_counts(ranks: Sequence[RankRecord]) -> list[LabelCounts]:
    """Returns the steps whose loss is a mean over labels on each rank, and whose gradient is the mean of the ranks'."""
    steps = [_steps(record) for record in ranks]
    found = []
    for step in sorted(set(steps[0]).intersection(*steps[1:])) if steps else ():
        own = [known[step] for known in steps]
        factors = [factor for means in own for factor, _ in means]
        same = max(factors) - min(factors) <= _SAME_FACTOR * max(map(abs, factors))
        if same and len({len(means) for means in own}) == 1 and _is_average(ranks, step):
            counts = tuple(tuple(event["count"] for _, event in means) for means in own)
            found.append(LabelCounts(step, counts, own[0][0][1]["place"]))
    return found


def _steps(record: RankRecord) -> dict[int, list[tuple[float, dict[str, Any]]]]:
    """Returns, for each step, the factor of each loss and its mean over labels; without steps of other losses."""
    found: dict[int, list[tuple[float, dict[str, Any]]]] = {}
    others, means = set[int](), list[dict[str, Any]]()
    for event in record.of_kind("mean_of_labels", "backward"):
        if event["kind"] == "mean_of_labels":
            means.append(event)
            continue
        if len(means) == 1 and event["loss"] and means[0]["value"] and means[0]["count"]:
            found.setdefault(event["step"], []).append((event["loss"] / means[0]["value"], means[0]))
        else:
            others.add(event["step"])
        means = []
    return {step: means for step, means in found.items() if step not in others}


def _is_average(ranks: Sequence[RankRecord], step: int) -> bool:
    """Returns whether the gradient of a step has the direction of the mean of what the ranks computed."""
    prefix = f"applied/{step}/"
    keys = [name.removeprefix(prefix) for name in ranks[0].tensors if name.startswith(prefix)]
    applied, mean = [], []
    for key in keys:
        own = [record.tensors.get(f"local/{step}/{key}") for record in ranks]
        if any(part is None or part.shape != ranks[0].tensors[prefix + key].shape for part in own):
            return False
        applied.append(ranks[0].tensors[prefix + key].double().flatten())
        mean.append(torch.stack([part.double().flatten() for part in own if part is not None]).sum(0))
    if not applied:
        return False
    cosine = torch.nn.functional.cosine_similarity(torch.cat(applied), torch.cat(mean), dim=0)
    return float(cosine) > 1 - _SAME_DIRECTION
