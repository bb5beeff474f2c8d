"""LD014: the gradient has the wrong scale."""

from math import isclose

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, without_batch_norm
from ddp_doctor.evidence.rank_comparison import MICRO_BATCHES, RankComparison, solve, vector
from ddp_doctor.evidence.requirements import compared, unmet
from ddp_doctor.faults.ld011_rank_steps_differently import own_clip
from ddp_doctor.findings import Finding, cannot_tell, fault
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
# Compression leaves a residual, which blurs the scale by about as much.
_TIMES_RESIDUAL = 5
# Half precision and 8 bits change the length of a gradient by far less than this.
_COMPRESSION = 0.05
# A forgotten or repeated division by the number of ranks.
_POWERS = (-2, -1, 1, 2)
# Relative; in 64 bits, healthy programs are far below.
_UNEVEN = 1e-3


def check(evidence: Evidence) -> list[Finding]:
    """Finds gradients with the right direction and the wrong length."""
    run = evidence.worked("ranks")
    if run and (summed := _summed_by_hook(run)):
        return [summed]
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
        return [cannot_tell(f"One process may count other samples: its gradient is 1 / {factor:.3g} of the ranks'.")]
    cause = "the gradients are summed" if factor > 1 else "the loss is a sum, or divided by the number of ranks again"
    message = f"Several ranks step with {factor:.3g} times the gradient of one process with the same samples: {cause}."
    return [fault(message, found.step, found.tensor, found.measured, loss_place(evidence))]


def _summed_by_hook(run: Run) -> Finding | None:
    """Finds a communication hook that returns the sum of the ranks' gradients, which the comparison does not use."""
    for hook in run.ranks[0].of_kind("comm_hook")[:1]:
        weights, _ = solve([vector(rank, 0, "local") for rank in run.ranks], vector(run.ranks[0], 0, "applied"))
        if weights and all(isclose(weight, 1, rel_tol=_COMPRESSION) for weight in weights):
            message = f"The communication hook {hook['name']} returns the sum of the ranks' gradients, not their mean."
            return fault(message, 0, place=hook["place"])
    return None


def _changed_before_the_step(evidence: Evidence, found: RankComparison) -> list[Finding]:
    """Returns what changes the gradient on its way to the optimizer, if it is known; otherwise, LD036 reports it."""
    uneven = found.passes and max(found.passes) - min(found.passes) > _UNEVEN * max(map(abs, found.passes))
    # What clips them before the average is LD011.
    if not uneven or own_clip(evidence):
        return []
    numbers = ", ".join(f"{weight / max(found.passes, key=abs):.3g}" for weight in found.passes)
    message = f"The passes of a step count unequally ({numbers}): what was summed over the ranks is summed again."
    return [fault(message, found.step, found.tensor, found.measured, loss_place(evidence))]
