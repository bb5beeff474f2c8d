"""LD012: batch norm depends on the number of ranks."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import without_batch_norm
from ddp_doctor.evidence.requirements import batch_norm, compared_at_once
from ddp_doctor.findings import Finding, cannot_tell, depends

TITLE = "Batch norm depends on the number of ranks"
CAUSE = """\
Batch norm computes its statistics over the samples of one rank, not over the global batch, and DDP keeps the running
statistics of rank 0 alone. With small batches per rank they are noisy; with large ones this may be intended.
"""
WRONG = """\
model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), head)
model = DistributedDataParallel(model)    # each rank normalizes with its own samples
"""
FIX = """\
Convert batch norm before wrapping the module, in Lightning by `Trainer(sync_batchnorm=True)`:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
"""
THREADS = ("LibreYOLO/libreyolo#531", "pytorch/pytorch#2584")
NUMERIC = True
EXPLAINS = "gradients"
NEEDS = (batch_norm, compared_at_once)


def check(evidence: Evidence) -> list[Finding]:
    """Finds a batch norm that is the first module whose outputs depend on the number of ranks."""
    found = evidence.reference
    if found.differs and not found.module and not found.modules_seen and not found.is_weighted:
        return [cannot_tell("The gradients differ, but the outputs of some modules are not known.")]
    if not found.differs or not found.module_class.startswith("BatchNorm"):
        return []
    message = f"{found.module} ({found.module_class}) normalizes with the samples of one rank."
    fixed = without_batch_norm(evidence)
    left = f"With synchronized batch norm, a difference of {fixed.difference:.1e} remains, which has another cause."
    gone = f"With synchronized batch norm, the difference is {fixed.difference:.1e} instead of {found.difference:.1e}."
    proof = "" if fixed.cannot else left if fixed.differs else gone
    run = evidence.worked("numbers")
    outputs = run.ranks[0].of_kind("output") if run else []
    place = next((event["place"] for event in outputs if event["name"] == found.module), "")
    return [depends(message, found.step, found.module, found.measured, place, proof)]
