"""LD012: batch norm depends on the number of ranks."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import without_batch_norm
from ddp_doctor.findings import Finding, depends

CODE = "LD012"
TITLE = "Batch norm depends on the number of ranks"
CAUSE = """\
Batch norm computes its statistics over the samples of one rank, not over the global batch. With small batches
per rank, the statistics are noisy and training differs from that on one device. DDP copies only the running
statistics of rank 0, so the others are lost. With large batches per rank this may be intended.
"""
FIX = """\
Convert batch norm before wrapping the module:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
In Lightning: `Trainer(sync_batchnorm=True)`. Group or layer norm need no synchronization.
"""
THREADS = ("LibreYOLO/libreyolo#531", "pytorch/pytorch#2584")
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
    return [depends(message, twin.step, twin.module, amount, proof=proof)]
