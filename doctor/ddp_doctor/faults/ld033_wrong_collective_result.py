"""LD033: a collective returns wrong values."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.reduction import wrong_reduction
from ddp_doctor.evidence.requirements import one_pass, optimizer_steps, wrapped
from ddp_doctor.findings import Finding, fault

CODE = "LD033"
TITLE = "A collective returns wrong values"
CAUSE = (
    "The gradients that the optimizers get are not the mean of the ranks' gradients: on a rank they are zero, or "
    "changed between the reduction and the step. Faulty hardware, drivers and communication hooks do this "
    "without an error. So does an asynchronous collective whose result is used before it is complete."
)
WRONG = """\
dist.all_reduce(parameter.grad, async_op=True)
optimizer.step()    # with the gradient before or after the reduction, or a part of both
"""
FIX = """\
Wait for an asynchronous collective before its result is used:
    work = dist.all_reduce(parameter.grad, async_op=True)
    work.wait()
Otherwise compare the result of an all-reduce with a known one before the training, and check hooks and the network.
"""
THREADS = ("OpenNMT/OpenNMT-py#2295", "pytorch/pytorch#84803", "pytorch/pytorch#96600")
STRUCTURAL = True
NEEDS = (wrapped, optimizer_steps, one_pass)


def check(evidence: Evidence) -> list[Finding]:
    """Finds averaged gradients that are not a combination of those of the ranks, or that may not be averaged yet."""
    if events := [event for rank in evidence.trained for event in rank.of_kind("not_waited")]:
        first = events[0]
        message = (
            f"{first['op']} is called with async_op=True, and the optimizer steps without waiting for it: it may use "
            "the gradients before they are reduced."
        )
        return [fault(message, first["step"], amount=f"{len(events)} calls", place=first["of"])]
    found = wrong_reduction(evidence)
    if found is None:
        return []
    what = "zero" if found.zero else "not a combination of those that the ranks computed"
    message = (
        f"The gradient that rank {found.rank} steps with is {what} for {len(found.parameters)} parameters, although "
        "DistributedDataParallel has averaged it: a collective or a communication hook returned wrong values."
    )
    return [fault(message, found.step, found.parameters[0], f"{found.amount:.1e} of the gradient", found.place)]
