"""LD014: the gradient has the wrong scale."""

from __future__ import annotations

from math import isclose

from ddp_doctor.evidence.communication import hook_effects
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, own_clip, without_batch_norm
from ddp_doctor.evidence.rank_comparison import MICRO_BATCHES, RankComparison
from ddp_doctor.evidence.requirements import compared
from ddp_doctor.findings import Finding, cannot_tell, fault, unclear

CODE = "LD014"
TITLE = "The gradient has the wrong scale"
CAUSE = """\
DDP averages the gradients. A loss that sums over the batch, or that is divided by the number of ranks once
more, gives a gradient that is too large or too small by this number. Adam hides it in the updates, but
clipping, weight decay and SGD do not. The effect resembles a wrong learning rate. Gradients that are
accumulated, and summed over the ranks by hand after each backward pass, count the first passes several times.
"""
WRONG = """\
loss = cross_entropy(logits, labels) / dist.get_world_size()    # DDP divides as well
loss.backward()
"""
FIX = """\
Use the mean over the local batch, and leave the average over the ranks to DDP:
    loss = cross_entropy(logits, labels)    # reduction='mean'; no further '/ world_size'
"""
THREADS = ("lightly-ai/lightly#1977", "huggingface/transformers#37474")
STRUCTURAL = False
EXPLAINS = "gradients"
NEEDS = (compared,)
_EQUAL = 1e-5
# Compression leaves a residual, which blurs the scale by about as much.
_TIMES_RESIDUAL = 5
# A forgotten or repeated division by the number of ranks.
_POWERS = (-2, -1, 1, 2)
# Relative; in 64 bits, healthy programs are far below.
_UNEVEN = 1e-3


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients with the right direction and the wrong length."""
    for hook in hook_effects(evidence.worked("ranks")):
        if hook.is_scaled:
            message = (
                f"The communication hook {hook.name} returns {hook.scale:.3g} times the mean of the ranks' gradients: "
                "a hook must divide by the number of ranks itself, once."
            )
            return [fault(message, hook.step, "", f"{abs(hook.scale - 1):.1e} of the gradient", hook.place)]
    return _by_loss(evidence)


def _by_loss(evidence: Evidence) -> list[Finding]:
    found = without_batch_norm(evidence)
    if not found.differs or not found.is_weighted or first_divergence(evidence):
        return []
    ranks = len(found.weights)
    used, residual = found.applied[0]
    if max(found.weights) - min(found.weights) >= _EQUAL * ranks or not used:
        return []
    # What the ranks apply, relative to one process with the same samples.
    own, rest = found.reference
    factor = used[0] / (own[0] if own and own[0] and rest <= max(_EQUAL, residual) else found.weights[0])
    uneven = residual > _UNEVEN or max(used) - min(used) > _UNEVEN * max(map(abs, used))
    if uneven:
        return _unexplained(evidence, found)
    if abs(factor - 1) < max(_EQUAL, _TIMES_RESIDUAL * residual):
        return []
    if found.method == MICRO_BATCHES and not any(isclose(factor, ranks**power, rel_tol=0.02) for power in _POWERS):
        message = (
            f"Several ranks step with {factor:.3g} times the gradient of one process, which got the recorded "
            "micro-batches of the ranks: if the program divides by a number of samples that it counts itself, one "
            "process has counted other samples."
        )
        return [cannot_tell(message)]
    summed = "the gradients of the ranks are summed, but not divided by their number"
    cause = (
        summed if factor > 1 else "the loss is a sum over samples, or is divided by the number of ranks a second time"
    )
    message = f"Several ranks step with {factor:.3g} times the gradient of one process with the same samples: {cause}."
    message += " Clipping hides this for as long as the gradient is longer than its limit." if found.clipped else ""
    later = evidence.compare("factor", weights=[1 / factor] * ranks).at(found)
    proof = (
        f"With {1 / factor:.3g} times the gradient, {found.falls_to(later)}" if later < found.difference / 100 else ""
    )
    return [fault(message, found.step, found.tensor, found.measured, loss_place(evidence), proof)]


def _unexplained(evidence: Evidence, found: RankComparison) -> list[Finding]:
    """Returns that the gradient is changed on its way to the optimizer, if no other check says by what."""
    if own_clip(evidence):
        # LD011.
        return []
    if found.passes and max(found.passes) - min(found.passes) > _UNEVEN * max(map(abs, found.passes)):
        numbers = ", ".join(f"{weight / max(found.passes, key=abs):.3g}" for weight in found.passes)
        message = (
            "Several ranks step with a gradient in which the backward passes of a step count unequally, and one "
            f"process with one in which they count equally: of rank 0, they count {numbers}. A gradient that was "
            "already summed over the ranks is summed again after the next pass: communicate it once, before the step."
        )
        return [fault(message, found.step, found.tensor, found.measured, loss_place(evidence))]
    message = (
        "Several ranks step with another gradient than one process with the same samples, although the gradients of "
        "their backward passes are those of one process: something changes them before the step, differently on "
        "each rank or nonlinearly."
    )
    return [unclear(message, found.step, found.tensor, found.measured, loss_place(evidence))]
