"""LD014: the gradient has the wrong scale."""

from __future__ import annotations

from math import isclose

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, own_clip, without_batch_norm
from ddp_doctor.evidence.rank_comparison import MICRO_BATCHES, RankComparison, solve
from ddp_doctor.evidence.requirements import compared, unmet
from ddp_doctor.findings import Finding, cannot_tell, fault
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import Run

TITLE = "The gradient has the wrong scale"
CAUSE = """\
DDP averages the gradients: a loss that sums over the batch, or that is divided by the number of ranks once more, gives
a gradient that is too large or too small by this number. Adam hides it in the updates; clipping and SGD do not.
"""
WRONG = """\
loss = cross_entropy(logits, labels) / dist.get_world_size()    # DDP divides as well
loss.backward()
"""
FIX = """\
Use the mean over the local batch, and leave the average over the ranks, once per step, to DDP:
    loss = cross_entropy(logits, labels)    # reduction='mean'; no further '/ world_size'
"""
THREADS = ("lightly-ai/lightly#1977", "huggingface/transformers#37474")
NUMERIC = True
EXPLAINS = "gradients"
_EQUAL = 1e-5
# Compression leaves a residual, which blurs the scale by about as much. Half precision and 8 bits change the length of
# a gradient by far less than this.
_TIMES_RESIDUAL, _COMPRESSION = 5, 0.05
# A forgotten or repeated division by the number of ranks.
_POWERS = (-2, -1, 1, 2)
# Relative; in 64 bits, healthy programs are far below.
_UNEVEN = 1e-3


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients with the right direction and the wrong length."""
    run = evidence.worked("ranks")
    if run and (scaled := _scaled_by_hook(run)):
        return [scaled]
    found = without_batch_norm(evidence)
    if not found.differs or not found.is_weighted or first_divergence(evidence):
        return unmet(evidence, compared)
    ranks = len(found.weights)
    factor = found.scale
    if max(found.weights) - min(found.weights) >= _EQUAL * ranks or not factor:
        return []
    if found.left > _UNEVEN:
        return _changed_before_the_step(evidence, found)
    if abs(factor - 1) < max(_EQUAL, _TIMES_RESIDUAL * found.left):
        return []
    if found.method == MICRO_BATCHES and not any(isclose(factor, ranks**power, rel_tol=0.02) for power in _POWERS):
        message = (
            f"Several ranks step with {factor:.3g} times the gradient of one process, which got their micro-batches, "
            "and may have counted other samples if the program divides by their number."
        )
        return [cannot_tell(message)]
    cause = "the gradients are summed" if factor > 1 else "the loss is a sum, or divided by the number of ranks again"
    message = f"Several ranks step with {factor:.3g} times the gradient of one process with the same samples: {cause}."
    return [fault(message, found.step, found.tensor, found.measured, loss_place(evidence))]


def _scaled_by_hook(run: Run) -> Finding | None:
    """Finds a communication hook that returns another multiple of the mean of the ranks' gradients."""
    hooks, names = run.ranks[0].of_kind("comm_hook"), run.ranks[0].tensors
    keys = [name.removeprefix("hook_out/") for name in names if name.startswith("hook_out/")]
    for step in sorted({int(key.split("/")[0]) for key in keys}):
        given, results = (
            [run.tensors(f"{kind}/{key}") for key in keys if key.startswith(f"{step}/")]
            for kind in ("hook_in", "hook_out")
        )
        if not all([*given, *results]) or any(not torch.equal(own[0], other) for own in results for other in own):
            continue
        mean = torch.cat([torch.stack(own).double().mean(0).flatten() for own in given])
        scale, left = solve([mean], torch.cat([own[0].double().flatten() for own in results]))
        factor = sum(scale)
        if factor > 0 and abs(factor - 1) > max(_COMPRESSION, _TIMES_RESIDUAL * left):
            message = f"The communication hook {hooks[0]['name']} returns {factor:.3g} times the mean of the gradients."
            return fault(message, step, "", f"{abs(factor - 1):.1e} of the gradient", hooks[0]["place"])
    return None


def _changed_before_the_step(evidence: Evidence, found: RankComparison) -> list[Finding]:
    """Returns what changes the gradient on its way to the optimizer, if it is known; otherwise, LD036 reports it."""
    uneven = found.passes and max(found.passes) - min(found.passes) > _UNEVEN * max(map(abs, found.passes))
    # What clips them before the average is LD011.
    if not uneven or own_clip(evidence):
        return []
    numbers = ", ".join(f"{weight / max(found.passes, key=abs):.3g}" for weight in found.passes)
    message = (
        f"The backward passes of a step count unequally on several ranks ({numbers}), and equally on one process: "
        "a gradient that was already summed over the ranks is summed again after the next pass."
    )
    return [fault(message, found.step, found.tensor, found.measured, loss_place(evidence))]
