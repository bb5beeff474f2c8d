"""LD015: the loss sees the samples of one rank."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, without_batch_norm
from ddp_doctor.evidence.requirements import compared_at_once
from ddp_doctor.findings import Finding, cannot_tell, depends, fault

CODE = "LD015"
TITLE = "The loss sees the samples of one rank"
CAUSE = """\
A contrastive loss compares the samples of a batch with each other. On several ranks it sees only the local
ones, unless the embeddings are gathered. `dist.all_gather` returns tensors without a gradient, so that a
gathered loss still lacks the gradient through the other ranks. The loss value is right in this case, and only
the gradient is wrong. A queue, a codebook or a normalizer that each rank updates with its own samples is the same
fault one step later: DDP replaces a buffer with that of rank 0, and the samples of the other ranks are lost.
"""
WRONG = """\
parts = [torch.empty_like(local) for _ in range(world_size)]
dist.all_gather(parts, local)    # returns no gradient
loss = contrastive(torch.cat(parts))
"""
FIX = """\
Gather the embeddings with a gradient:
    from torch.distributed.nn.functional import all_gather
    embeddings = torch.cat(all_gather(local))
Its backward sums over the ranks, and DDP divides by their number: check the scale.
Before a queue or a codebook is updated, gather or reduce what it gets. `dist.all_gather` is right there.
"""
THREADS = ("Lightning-Universe/lightning-bolts#179", "facebookresearch/SLIP#31")
STRUCTURAL = False
EXPLAINS = "gradients"
# What is drawn for a sample does not depend on the others.
_RANDOM = {"Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout", "FeatureAlphaDropout", "RReLU"}
NEEDS = (compared_at_once,)


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients that are not a combination of those of the ranks, although all modules agree."""
    found = without_batch_norm(evidence)
    if not found.differs or found.is_weighted or not found.weights or first_divergence(evidence):
        return []
    where = found.step, found.tensor, found.measured
    if found.module_class in _RANDOM:
        reason = f"{found.module} ({found.module_class}) draws for samples in another order than one process does."
        return [cannot_tell(f"The gradients differ, but {reason}")]
    if found.module:
        message = f"The outputs of {found.module} ({found.module_class}) depend on which samples share a rank."
        return [depends(message, *where, loss_place(evidence))]
    if not found.modules_seen:
        return [cannot_tell("The gradients differ, but the outputs of some modules are not known.")]
    place = loss_place(evidence)
    left = f"The gradients of the ranks leave {found.residual:.1e} of that of one process, although all modules agree"
    for event in evidence.ranks[0].of_kind("collective"):
        if event["op"].startswith("all_gather") and event["step"] == found.step:
            message = f"{left}: the loss gathers samples of all ranks, but {event['op']} passes no gradient to them."
            return [fault(message, *where, event["place"])]
    if found.step < len({event["optimizer"] for event in evidence.ranks[0].of_kind("step")}):
        message = (
            f"{left}: the loss combines the samples of a batch, such as the negatives of a contrastive loss, and sees "
            "those of one rank only."
        )
        return [depends(message, *where, place)]
    if buffer := _buffer_of_each_rank(evidence):
        name, is_replaced = buffer
        message = f"{left}, because each rank updates the buffer {name} with its own samples alone"
        message += ": DistributedDataParallel then replaces it with that of rank 0." if is_replaced else "."
        return [fault(message, found.step, name, found.measured, place)]
    message = (
        f"{left}, and although the step before agreed. Something beside the parameters and buffers, such as a "
        "codebook or a queue, is updated by each rank with its own samples and not reduced, or the loss combines "
        "the samples of a batch."
    )
    return [depends(message, *where, place)]


def _buffer_of_each_rank(evidence: Evidence) -> tuple[str, bool] | None:
    """Returns the first buffer in which a step has left other values on each rank, and whether DDP replaces it.

    Buffers of batch norm do not count: LD012 reports them.
    """
    for calls in zip(*(rank.of_kind("forward") for rank in evidence.trained), strict=False):
        first = calls[0].get("buffers") or {}
        if any((call["module"], call["step"]) != (calls[0]["module"], calls[0]["step"]) for call in calls):
            return None
        for name, value in first.items():
            if any(call["buffers"].get(name, value) != value for call in calls):
                broadcast = any(event["buffers"] for event in evidence.trained[0].of_kind("ddp_forward"))
                return name, broadcast
    return None
