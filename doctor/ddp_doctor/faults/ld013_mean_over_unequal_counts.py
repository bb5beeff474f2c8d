"""LD013: a mean over unequal counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, without_batch_norm
from ddp_doctor.evidence.rank_comparison import vector
from ddp_doctor.evidence.requirements import compared_at_once, unmet
from ddp_doctor.findings import Finding, fault, listed, note
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord

# Of each rank, the means over labels of a step.
Means = list[list[dict[str, Any]]]

CODE = "LD013"
TITLE = "A mean over unequal counts"
CAUSE = """\
Each rank, or each micro-batch, divides its loss by its own number of labels, and all count equally: if padding or
ignored labels make the numbers unequal, a token among few counts more. The noise of the loss hides the error.
"""
WRONG = """\
# The mean over the labels of this rank: ranks with few labels count as much as ranks with many.
loss = cross_entropy(logits, labels, ignore_index=-100)
loss.backward()
"""
FIX = """\
Divide the sum by the global count:
    count = (labels != -100).sum()
    dist.all_reduce(count)
    loss = cross_entropy(logits, labels, reduction='sum') * world_size / count
"""
THREADS = ("huggingface/transformers#34191", "huggingface/transformers#24725", "huggingface/transformers#34242")
STRUCTURAL = False
EXPLAINS = "gradients"
_EQUAL = 1e-5
# Counts that differ by less, such as those of the ignored pixels of large images, are a note.
_NEGLIGIBLE = 0.01
# Relative difference of the factors between the mean over labels and the loss.
_SAME_FACTOR = 1e-3
# The gradients of 32 bits are averaged, apart from a factor.
_SAME_DIRECTION = 1e-5


def check(evidence: Evidence) -> list[Finding]:
    """Finds ranks whose gradients should not count equally."""
    if missing := unmet(evidence, compared_at_once):
        return _by_labels(evidence) or missing
    found = without_batch_norm(evidence)
    if not found.differs or not found.is_weighted or first_divergence(evidence):
        return []
    weights, ranks = found.weights, len(found.weights)
    if max(weights) - min(weights) < _EQUAL * ranks:
        return []
    shares = ", ".join(f"{weight:.6g} for rank {rank}" for rank, weight in enumerate(weights))
    message = (
        f"The gradient of the whole batch is a mean of those of the ranks with unequal weights ({shares}), but each "
        f"counts {1 / ranks:.6g}: the ranks divide by unequal numbers of samples, labels or tokens."
    )
    later = evidence.compare("weights", weights=[weight * ranks for weight in weights]).at(found)
    proof = f"With these weights, {found.falls_to(later)}" if later < found.difference / 100 else ""
    verdict = note if max(abs(weight * ranks - 1) for weight in weights) < _NEGLIGIBLE else fault
    return [verdict(message, found.step, found.tensor, found.measured, loss_place(evidence), proof)]


def _by_labels(evidence: Evidence) -> list[Finding]:
    """Compares the numbers of labels, which are known if the loss is a mean over labels and nothing else."""
    found = _means(evidence.trained)
    worst = max(found, key=lambda step: _excess(found[step]), default=0)
    if worst not in found or not (excess := _excess(found[worst])):
        return []
    counts = " and ".join(listed([str(mean["count"]) for mean in own]) for own in found[worst])
    message = (
        f"The loss of step {worst} is a mean over the labels of each rank ({counts}), and these means count equally: a "
        "label among few counts more than on one process."
    )
    verdict = note if excess < _NEGLIGIBLE else fault
    return [verdict(message, worst, place=found[worst][0][0]["place"])]


def _excess(means: Means) -> float:
    """Returns the largest relative difference between the number of labels of a mean and that of the others."""
    counts = [mean["count"] for own in means for mean in own]
    return max(abs(count * len(counts) / sum(counts) - 1) for count in counts)


def _means(ranks: Sequence[RankRecord]) -> dict[int, Means]:
    """Returns the steps whose loss is a mean over labels on each rank, and whose gradient is the mean of the ranks'."""
    steps, found = [_steps(record) for record in ranks], {}
    for step in sorted(set(steps[0]).intersection(*steps[1:])) if steps else ():
        own = [known[step] for known in steps]
        factors = [mean["factor"] for means in own for mean in means]
        same = max(factors) - min(factors) <= _SAME_FACTOR * max(map(abs, factors))
        if same and len({len(means) for means in own}) == 1 and _is_average(ranks, step):
            found[step] = own
    return found


def _steps(record: RankRecord) -> dict[int, list[dict[str, Any]]]:
    """Returns, for each step, its means over labels with the factor of each loss; without steps of other losses."""
    found: dict[int, list[dict[str, Any]]] = {}
    others, means = set[int](), list[dict[str, Any]]()
    for event in record.of_kind("mean_of_labels", "backward"):
        if event["kind"] == "mean_of_labels":
            means.append(event)
            continue
        if len(means) == 1 and event["loss"] and means[0]["value"] and means[0]["count"]:
            found.setdefault(event["step"], []).append({**means[0], "factor": event["loss"] / means[0]["value"]})
        else:
            others.add(event["step"])
        means = []
    return {step: means for step, means in found.items() if step not in others}


def _is_average(ranks: Sequence[RankRecord], step: int) -> bool:
    """Returns whether the gradient of a step has the direction of the mean of what the ranks computed."""
    vectors = [vector(ranks[0], step, "applied"), *(vector(rank, step, "local") for rank in ranks)]
    known = [one for one in vectors if one is not None]
    if len(known) < len(vectors) or len({len(one) for one in known}) > 1:
        return False
    cosine = torch.nn.functional.cosine_similarity(known[0], torch.stack(known[1:]).sum(0), dim=0)
    return float(cosine) > 1 - _SAME_DIRECTION
