"""LD014: the gradient has the wrong scale."""

from __future__ import annotations

from math import isclose

from ddp_doctor.evidence.communication import hook_effects
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, own_clip, without_batch_norm
from ddp_doctor.evidence.rank_comparison import MICRO_BATCHES, RankComparison
from ddp_doctor.evidence.requirements import compared, unmet
from ddp_doctor.findings import Finding, cannot_tell, fault, unclear

CODE = "LD014"
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
STRUCTURAL = False
EXPLAINS = "gradients"
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
            message = f"The communication hook {hook.name} returns {hook.scale:.3g} times the mean of the gradients."
            return [fault(message, hook.step, "", f"{abs(hook.scale - 1):.1e} of the gradient", hook.place)]
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
    later = evidence.compare("factor", weights=[1 / factor] * ranks).at(found)
    proof = (
        f"With {1 / factor:.3g} times the gradient, {found.falls_to(later)}" if later < found.difference / 100 else ""
    )
    return [fault(message, found.step, found.tensor, found.measured, loss_place(evidence), proof)]


def _changed_before_the_step(evidence: Evidence, found: RankComparison) -> list[Finding]:
    """Returns that the gradient is changed on its way to the optimizer, if no other check says by what."""
    if own_clip(evidence):
        # LD011.
        return []
    where = found.step, found.tensor, found.measured, loss_place(evidence)
    if found.passes and max(found.passes) - min(found.passes) > _UNEVEN * max(map(abs, found.passes)):
        numbers = ", ".join(f"{weight / max(found.passes, key=abs):.3g}" for weight in found.passes)
        message = (
            f"The backward passes of a step count unequally on several ranks ({numbers}), and equally on one process: "
            "a gradient that was already summed over the ranks is summed again after the next pass."
        )
        return [fault(message, *where)]
    message = (
        "Several ranks step with another gradient than one process, although those of their backward passes agree: "
        "something changes them before the step, differently on each rank or nonlinearly."
    )
    return [unclear(message, *where)]
