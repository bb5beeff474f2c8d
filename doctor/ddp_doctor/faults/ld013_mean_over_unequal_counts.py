"""LD013: a mean over unequal counts."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, without_batch_norm
from ddp_doctor.evidence.requirements import compared_at_once
from ddp_doctor.findings import Finding, fault, note

TITLE = "A mean over unequal counts"
CAUSE = """\
Each rank, or each micro-batch, divides its loss by its own number of labels, and all count equally: if padding or
ignored labels make the numbers unequal, a token among few counts more. The noise of the loss hides the error.
"""
WRONG = """\
loss = cross_entropy(logits, labels, ignore_index=-100)    # the mean over the labels of this rank
loss.backward()
"""
FIX = """\
Divide the sum by the global count:
    count = (labels != -100).sum()
    dist.all_reduce(count)
    loss = cross_entropy(logits, labels, reduction='sum') * world_size / count
"""
THREADS = ("huggingface/transformers#34191", "huggingface/transformers#24725", "huggingface/transformers#34242")
NUMERIC = True
EXPLAINS = "gradients"
NEEDS = (compared_at_once,)
_EQUAL = 1e-5
# Counts that differ by less, such as those of the ignored pixels of large images, are a note.
_NEGLIGIBLE = 0.01


def check(evidence: Evidence) -> list[Finding]:
    """Finds ranks whose gradients should not count equally."""
    found = without_batch_norm(evidence)
    if not found.differs or not found.is_weighted or first_divergence(evidence):
        return []
    weights, ranks = found.weights, len(found.weights)
    if max(weights) - min(weights) < _EQUAL * ranks:
        return []
    shares = ", ".join(f"{weight:.6g} for rank {rank}" for rank, weight in enumerate(weights))
    message = f"Ranks should count {shares}, not {1 / ranks:.6g} each: their numbers of labels are unequal."
    verdict = note if max(abs(weight * ranks - 1) for weight in weights) < _NEGLIGIBLE else fault
    return [verdict(message, found.step, found.tensor, found.measured, loss_place(evidence))]
