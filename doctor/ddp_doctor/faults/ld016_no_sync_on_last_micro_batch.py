"""LD016: no_sync covers the last micro-batch."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, later_divergence
from ddp_doctor.evidence.requirements import averages_gradients, no_sync
from ddp_doctor.findings import Finding, fault

CODE = "LD016"
TITLE = "no_sync covers the last micro-batch"
CAUSE = """\
DDP decides in the forward pass whether the next backward reduces the gradients. `no_sync` around the backward
alone has no effect: each micro-batch is reduced, which only costs time. `no_sync` that also
covers the last micro-batch means that no gradient is reduced, and the ranks drift apart. The last
micro-batch of an epoch is one of them, if the optimizer steps there after an incomplete window.
"""
WRONG = """\
with ddp.no_sync() if last else contextlib.nullcontext():    # the wrong way round
    (loss_of(ddp(batch)) / micro_batches).backward()
"""
FIX = """\
Put forward and backward of all but the last micro-batch into `no_sync`:
    with contextlib.nullcontext() if last else ddp.no_sync():
        (loss_of(ddp(batch)) / micro_batches).backward()
"""
THREADS = ("huggingface/accelerate#1726", "pytorch/PiPPy#1133", "karpathy/build-nanogpt#30")
STRUCTURAL = True
EXPLAINS = "weights"
NEEDS = (no_sync, averages_gradients)


def check(evidence: Evidence) -> list[Finding]:
    """Finds accumulation windows whose last backward pass runs within `no_sync`."""
    found = first_divergence(evidence)
    if found is None and not evidence.faulty and no_sync(evidence) is None:
        # The last window of an epoch may have fewer micro-batches than the others.
        found = later_divergence(evidence)
    if found is None or not found.passes or found.passes[-1]["synchronizes"]:
        return []
    synchronized = [str(number) for number, event in enumerate(found.passes, 1) if event["synchronizes"]]
    when = f"only pass {', '.join(synchronized)}" if synchronized else "none"
    message = (
        f"Of the {len(found.passes)} passes before the optimizer step, {when} averages the gradients: the last one "
        "runs within no_sync, so its gradients stay on their rank."
    )
    return [fault(message, found.step, found.tensor, found.measured, found.passes[-1]["place"] or found.place)]
