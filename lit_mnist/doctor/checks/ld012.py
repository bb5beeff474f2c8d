"""LD012: batch norm depends on the number of ranks."""

from __future__ import annotations

from lit_mnist.doctor.evidence import Evidence
from lit_mnist.doctor.findings import Finding, Verdict
from lit_mnist.doctor.gradients import without_batch_norm

TITLE = "Batch norm depends on the number of ranks"
CAUSE = (
    "Batch norm normalizes with the samples of its rank. With N ranks, the statistics come from 1/N of the "
    "batch, and each rank has other running statistics. This may be intended, but the training is not that of"
    " one process."
)
FIX = (
    "Synchronize it:\n"
    "    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"
    "Lightning: Trainer(sync_batchnorm=True). On CPUs: lit_mnist.plugins.PortableSyncBatchNorm."
)
THREADS = ("LibreYOLO/libreyolo#531",)
STRUCTURAL = False


def check(evidence: Evidence) -> list[Finding]:
    """Finds a batch norm that is the first module whose outputs depend on the number of ranks."""
    twin = evidence.twin
    if not twin.differs or not twin.module_class.startswith("BatchNorm"):
        return []
    fixed = without_batch_norm(evidence)
    proof = ""
    if not fixed.cannot:
        proof = (
            f"With synchronized batch norm, the difference falls from {twin.difference:.1e} to {fixed.difference:.1e}."
        )
    message = (
        f"{twin.module} ({twin.module_class}) normalizes with the samples of one rank, so the gradient depends on the "
        "number of ranks."
    )
    amount = f"{twin.difference:.1e} of the gradient"
    return [Finding("LD012", Verdict.DEPENDS, message, twin.step, twin.module, amount, proof=proof)]
