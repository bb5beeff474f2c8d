"""LD016: no_sync covers the last micro-batch."""

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, later_divergence
from ddp_doctor.evidence.requirements import averages_gradients, need, wrapped
from ddp_doctor.findings import Finding, fault, not_reached

TITLE = "no_sync covers the last micro-batch"
CAUSE = """\
DDP decides in the forward pass whether the next backward reduces the gradients. If `no_sync` covers the last
micro-batch of a window, which may be the incomplete one of an epoch, none is reduced, and the ranks drift apart.
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
EXPLAINS = "weights"


def check(evidence: Evidence) -> list[Finding]:
    """Finds accumulation windows whose last backward pass runs within `no_sync`."""
    found = first_divergence(evidence)
    if found is None and not evidence.faulty:
        # The last window of an epoch may have fewer micro-batches than the others.
        found = later_divergence(evidence)
    if found is None or not found.passes or found.passes[-1]["synchronizes"]:
        return []
    message = f"The last of {len(found.passes)} passes before the optimizer step runs within no_sync."
    return [fault(message, found.step, found.tensor, found.measured, found.passes[-1]["place"] or found.place)]


def _skips_averaging(evidence: Evidence) -> bool:
    passes = [event for rank in evidence.ranks for event in rank.of_kind("ddp_forward") if event["gradients"]]
    return any(not event["synchronizes"] for event in passes)


NEEDS = (need(_skips_averaging, not_reached("no_sync is not used."), wrapped), averages_gradients)
