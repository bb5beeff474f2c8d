"""LD012: batch norm uses the statistics of each rank alone."""

from __future__ import annotations

from lit_mnist.doctor.evidence import Evidence
from lit_mnist.doctor.findings import Finding, Verdict
from lit_mnist.doctor.gradients import without_batch_norm

STRUCTURAL = False


def check(evidence: Evidence) -> list[Finding]:
    """Finds a batch norm that is the first module whose outputs depend on the number of ranks."""
    twin = evidence.twin
    if not twin.differs or not twin.module_class.startswith("BatchNorm"):
        return []
    fixed = without_batch_norm(evidence)
    proof = ""
    if not fixed.cannot:
        proof = f"With synchronized batch norm, the difference falls from {twin.difference:.1e} to {fixed.difference:.1e}."
    message = (
        f"{twin.module} ({twin.module_class}) normalizes with the samples of one rank, so the gradient depends on the "
        "number of ranks."
    )
    amount = f"{twin.difference:.1e} of the gradient"
    return [Finding("LD012", Verdict.DEPENDS, message, twin.step, twin.module, amount, proof=proof)]
