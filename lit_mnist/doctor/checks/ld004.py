"""LD004: the sampler is replaced or split twice."""

from __future__ import annotations

from lit_mnist.doctor.evidence import Evidence, fault
from lit_mnist.doctor.findings import Finding
from lit_mnist.doctor.order import names, replaced_sampler

TITLE = "The sampler is replaced or split twice"
CAUSE = (
    "A framework that distributes the loaders itself wraps or replaces a sampler of your own. A sampler that "
    "is already aware of the ranks is then split a second time, and part of the data set is never used."
)
FIX = (
    "Keep your own sampler:\n"
    "    Trainer(use_distributed_sampler=False)\n"
    "or use a sampler without ranks, and let the framework split it."
)
THREADS = ("Lightning-AI/pytorch-lightning#1995",)
STRUCTURAL = True


def check(evidence: Evidence) -> list[Finding]:
    """Compares the sampler and its samples on one process and on the ranks."""
    found = replaced_sampler(evidence)
    if found is None:
        return []
    one, several, lost = found
    examples = ", ".join(str(index) for index in sorted(lost)[:4])
    together = len({index for event in several for index in event["indices"]})
    message = (
        f"On one process the sampler is a {one['sampler']}, which gives {len(set(one['indices']))} samples per epoch. "
        f"On {names(range(len(several)))} a {several[0]['sampler']} takes its place, which gives them {together} "
        f"samples together: {len(lost)} are never seen, such as {examples}."
    )
    amount = f"{len(lost)} of {len(set(one['indices']))} samples lost"
    return [fault("LD004", message, step=several[0]["step"], amount=amount, place=evidence.relative(one["place"]))]
