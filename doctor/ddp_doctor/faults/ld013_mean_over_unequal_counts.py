"""LD013: a mean over unequal counts."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, without_batch_norm
from ddp_doctor.evidence.label_counts import label_counts
from ddp_doctor.evidence.requirements import compared_at_once
from ddp_doctor.findings import Finding, fault, listed, note

CODE = "LD013"
TITLE = "A mean over unequal counts"
CAUSE = """\
Each rank divides its loss by its own number of labels or tokens, and DDP gives all ranks the same weight. If
padding or ignored labels make the counts unequal, a token on a rank with few tokens counts more. The same
occurs between the micro-batches of an accumulation window. The error depends on the batch and vanishes in the
noise of the loss.
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
NEEDS = (compared_at_once,)
_EQUAL = 1e-5
# Counts that differ by less, such as those of the ignored pixels of large images, are a note.
_NEGLIGIBLE = 0.01


def check(evidence: Evidence) -> list[Finding]:
    """Finds ranks whose gradients should not count equally."""
    if compared_at_once(evidence):
        return _by_labels(evidence)
    found = without_batch_norm(evidence)
    if not found.differs or not found.is_weighted or first_divergence(evidence):
        return []
    weights, ranks = found.weights, len(found.weights)
    if max(weights) - min(weights) < _EQUAL * ranks:
        return []
    negligible = max(abs(weight * ranks - 1) for weight in weights) < _NEGLIGIBLE
    digits = ".6f" if negligible else ".3f"
    shares = ", ".join(f"{weight:{digits}} for rank {rank}" for rank, weight in enumerate(weights))
    message = (
        f"The gradient of the whole batch is a mean of those of the ranks with unequal weights ({shares}), but each "
        f"counts {1 / ranks:{digits}}: the ranks divide by unequal numbers of samples, labels or tokens."
    )
    later = evidence.compare("weights", weights=[weight * ranks for weight in weights]).at(found)
    proof = f"With these weights, {found.falls_to(later)}" if later < found.difference / 100 else ""
    verdict = note if negligible else fault
    return [verdict(message, found.step, found.tensor, found.measured, loss_place(evidence), proof)]


def _by_labels(evidence: Evidence) -> list[Finding]:
    """Compares the numbers of labels, which are known if the loss is a mean over labels and nothing else."""
    steps = label_counts(evidence.trained)
    worst = max(steps, key=lambda step: step.excess, default=None)
    if worst is None or not worst.excess:
        return []
    counts = " and ".join(f"{listed([*map(str, own)])} on rank {rank}" for rank, own in enumerate(worst.counts))
    message = (
        f"The loss of step {worst.step} is a mean over the labels of each rank ({counts}), and these means count "
        "equally: a label among few counts more than on one process."
    )
    shares = ", ".join(f"{share:.3f}" for share in worst.shares)
    amount = f"{1 / len(worst.shares):.3f} instead of {shares} of the gradient"
    verdict = note if worst.excess < _NEGLIGIBLE else fault
    return [verdict(message, worst.step, "", amount, worst.place)]
