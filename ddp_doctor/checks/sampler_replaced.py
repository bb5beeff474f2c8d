"""LD004: the sampler is replaced or split twice."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import names, replaced_sampler
from ddp_doctor.findings import Finding, fault

CODE = "LD004"
TITLE = "The sampler is replaced or split twice"
CAUSE = """\
With several ranks, a framework may put a distributed sampler in the place of the loader's own. A sampler that
balances classes, weights samples or selects a subset is then lost, and the model sees another distribution
than on one device. Training continues without an error.
"""
FIX = """\
Split in your own sampler, and tell the framework to keep it:
    Trainer(use_distributed_sampler=False)
The sampler must then give each rank its own part of each epoch.
"""
THREADS = ("Lightning-AI/pytorch-lightning#1995", "Lightning-AI/pytorch-lightning#9655")
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
    return [fault(message, step=several[0]["step"], amount=amount, place=one["place"])]
