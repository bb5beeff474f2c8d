"""LD015: the loss sees the samples of one rank."""

from dataclasses import replace

from ddp_doctor.evidence.derivative import THRESHOLD, measure
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, without_batch_norm
from ddp_doctor.evidence.requirements import compared_at_once, optimizer_steps, unmet
from ddp_doctor.findings import Finding, Verdict, cannot_tell, depends, fault

TITLE = "The loss sees the samples of one rank"
CAUSE = """\
A contrastive loss sees only the local samples unless they are gathered, and `dist.all_gather` returns no gradient. A
queue or a codebook that each rank updates with its own samples is the same fault one step later.
"""
WRONG = """\
parts = [torch.empty_like(local) for _ in range(world_size)]
dist.all_gather(parts, local)    # returns no gradient
loss = contrastive(torch.cat(parts))
"""
FIX = """\
Gather the embeddings with a gradient, which sums over the ranks, and what a queue or a codebook gets without one:
    from torch.distributed.nn.functional import all_gather
    embeddings = torch.cat(all_gather(local))
"""
THREADS = ("Lightning-Universe/lightning-bolts#179", "facebookresearch/SLIP#31")
NUMERIC = True
EXPLAINS = "gradients"
NEEDS = (optimizer_steps,)


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that are not a combination of those of the ranks, although all modules agree.

    Where that depends on the number of ranks, or cannot be compared, the gradient still has to be the derivative of
    what the ranks compute.
    """
    found = _compared(evidence)
    unknown = (Verdict.DEPENDS, Verdict.CANNOT_TELL, Verdict.NOT_APPLICABLE)
    if evidence.faulty or not any(finding.verdict in unknown for finding in found):
        return found
    measured = measure(evidence)
    if measured and abs(measured[0] - 1) > THRESHOLD:
        quotient, step = measured
        times = f"{quotient:.3g} times the derivative of their mean loss"
        message = f"Unlike one process, the ranks step with {times}: a collective passes no gradient."
        amount = f"{abs(quotient - 1):.1e} of the gradient"
        return [fault(message, step, "", amount, _collective(evidence) or loss_place(evidence))]
    told = " The gradient is the derivative of what the ranks compute." if measured else ""
    return [replace(finding, message=f"{finding.message}{told}") for finding in found]


def _collective(evidence: Evidence) -> str:
    """Returns where the program calls a collective before its first optimizer step, or nothing."""
    events = evidence.ranks[0].of_kind("collective")
    return next((event["place"] for event in events if event["place"] and event["size"] > 1 and not event["step"]), "")


def _compared(evidence: Evidence) -> list[Finding]:
    """Compares the gradients of the ranks with that of one process."""
    found = without_batch_norm(evidence)
    if not found.differs or found.is_weighted or not found.weights or first_divergence(evidence):
        return unmet(evidence, compared_at_once)
    where = found.step, found.tensor, found.measured, loss_place(evidence)
    module = f"{found.module} ({found.module_class})"
    if "Dropout" in found.module_class:
        return [cannot_tell(f"The gradients differ, but {module} draws for samples in another order than one process.")]
    if found.module:
        return [depends(f"The outputs of {module} depend on which samples share a rank.", *where)]
    if not found.modules_seen:
        return [cannot_tell("The gradients differ, but the outputs of some modules are not known.")]
    left = f"The gradients of the ranks leave {found.residual:.1e} of that of one process, although all modules agree"
    if found.step < len({event["optimizer"] for event in evidence.ranks[0].of_kind("step")}):
        return [depends(f"{left}: the loss combines the samples of a batch, and sees those of one rank only.", *where)]
    if name := _buffer_of_each_rank(evidence):
        return [fault(f"{left}: each rank updates the buffer {name} with its own samples alone.", *where)]
    return [depends(f"{left}, and the step before agreed: each rank updates something by its own samples.", *where)]


def _buffer_of_each_rank(evidence: Evidence) -> str:
    """Returns the first buffer in which a step has left other values on each rank, or nothing.

    Buffers of batch norm do not count: LD012 reports them.
    """
    for calls in zip(*(rank.of_kind("forward") for rank in evidence.trained), strict=False):
        first = calls[0].get("buffers") or {}
        if any((call["module"], call["step"]) != (calls[0]["module"], calls[0]["step"]) for call in calls):
            return ""
        for name, value in first.items():
            if any(call["buffers"].get(name, value) != value for call in calls):
                return str(name)
    return ""
