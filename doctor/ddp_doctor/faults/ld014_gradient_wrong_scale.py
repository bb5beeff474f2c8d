"""LD014: the gradient has the wrong scale."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from math import isclose

from ddp_doctor.evidence.communication import hook_effects
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import first_divergence, loss_place, own_clip, without_batch_norm
from ddp_doctor.evidence.rank_comparison import MICRO_BATCHES, RankComparison
from ddp_doctor.evidence.requirements import compared, unmet
from ddp_doctor.findings import Finding, cannot_tell, fault, unclear
from ddp_doctor.source.file import MEDIUM, Likely, SourceFile

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


_RANKS = re.compile(r"(.*[._])?(get_)?(world_?size|num_processes|n_?ranks|num_replicas)(\(.*\))?", re.IGNORECASE)


def read(file: SourceFile) -> Iterator[Likely]:
    """Finds a loss that is divided by the number of ranks before its backward pass."""
    if not file.program.distributed or "DistributedDataParallel" not in "".join(one.text for one in file.program.files):
        return
    for node in file.nodes if file.called("backward") else ():
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div):
            by = node.right if isinstance(node, ast.BinOp) else node.value
            if _RANKS.fullmatch(ast.unparse(by)) and _is_backed(file, node):
                message = f"the loss is divided by {ast.unparse(by)}, and DistributedDataParallel divides again."
                yield Likely(node, message, MEDIUM)


def _is_backed(file: SourceFile, node: ast.AST) -> bool:
    """Returns whether the quotient, under the name it gets, is what `backward()` is called on next."""
    backwards = [one for one in file.called("backward") if file.scope(one) is file.scope(node)]
    if any(file.contains(one, node) for one in backwards):
        return True
    statement = next(one for one in [node, *file.above(node)] if isinstance(one, ast.stmt))
    target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
    passes = [one for one in backwards if one.lineno > statement.lineno]
    if target is None or not passes or file.without_gradients(node):
        return False
    name, end = ast.unparse(target), passes[0].lineno
    later = [one for one, _ in file.assigned(target) if statement.lineno < one.lineno < end]
    changed = any(not isinstance(one, ast.AugAssign) for one in later)
    parts = [one for one in ast.walk(passes[0]) if isinstance(one, ast.expr)]
    return not changed and any(ast.unparse(part) == name for part in parts)


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
