"""Whether the gradient that the ranks apply is the derivative of what they compute: a proof that needs no reference.

The mean of the losses of all ranks is a function of the weights. Two runs in 64 bits with the same batches and draws
move the weights by a small step forth and back in one direction, and the difference of their losses must be that which
the applied gradient predicts. It is not if a collective passes no gradient, or if a rank applies a gradient of its own.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ddp_doctor.evidence.communication import averaged_weights, own_models
from ddp_doctor.evidence.gradients import owned
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord, Run

if TYPE_CHECKING:
    from ddp_doctor.evidence.evidence import Evidence

# Of the weights: 64 bits have 16 digits, and the smaller the step, the fewer kinks of ReLU are within it.
_STEP = 1e-7
_EXACT, THRESHOLD = 1e-5, 1e-3
# The parameters' shares of the change nearly cancel in so few of the directions, where a kink would count.
_CANCELS = 0.03


def measure(evidence: Evidence) -> tuple[float, int] | None:
    """Returns the change that the gradient of a rank predicts, divided by that of the mean of the losses, and the step.

    It is that of the rank that is furthest from 1, which the derivative gives; None if it is not known. A loss in which
    a part is kept from autograd, as the target of a distillation, or computed in 32 bits, has another derivative on one
    process as well, which then is no fault of the ranks.
    """
    alone = any(rank.of_kind("alone") for rank in evidence.ranks) or any(map(owned, evidence.trained))
    if alone or averaged_weights(evidence.worked("ranks")) or own_models(evidence) or not evidence.deterministic:
        return None
    found = _measure(evidence, evidence.spec.world_size)
    if found and _distance(found[0]) > THRESHOLD:
        one = _measure(evidence, 1)
        return found if one and _distance(one[0]) <= _EXACT else None
    return found


def _measure(evidence: Evidence, world_size: int) -> tuple[float, int] | None:
    optimizers = [event["optimizer"] for rank in evidence.ranks[:1] for event in rank.of_kind("step")]
    if not optimizers or optimizers.count(optimizers[0]) < 2:
        return None
    optimizer, step = optimizers[0], optimizers.index(optimizers[0], 1)

    def moved(way: str, by: float) -> Run:
        changes: dict[str, Any] = {"move": {"optimizer": optimizer, "step": step, "by": by}}
        name = f"moved {way}{' on one process' if world_size == 1 else ''}"
        return evidence.run(name, purpose="numbers", double=True, world_size=world_size, interventions=changes)

    forth = moved("forth", _STEP)
    back = moved("back", -_STEP) if forth.worked else forth
    quotient = _compare(forth, back, optimizer, step) if back.worked else None
    return None if quotient is None else (quotient, step)


def _compare(forth: Run, back: Run, optimizer: int, step: int) -> float | None:
    """Compares the losses and the gradients of two runs whose weights were moved."""
    losses = [_loss(rank, step) for run in (forth, back) for rank in run.ranks]
    known = [loss for loss in losses if loss is not None]
    count = len(forth.ranks)
    change = (sum(known[:count]) - sum(known[count:])) / count
    shares = [_shares(*pair, f"{step}/{optimizer}:") for pair in zip(forth.ranks, back.ranks, strict=True)]
    if any(event["sharded"] for event in forth.ranks[0].of_kind("step")):
        shares = [[share for own in shares for share in own]]
    predicted, sizes = [sum(own) for own in shares], [math.hypot(*own) for own in shares]
    if len(known) < len(losses) or abs(change) <= _CANCELS * max(sizes) or not all(predicted):
        return None
    # The gradient of a loss that a GradScaler has multiplied is divided by the scale before the step.
    scales = {1.0, *(event["scale"] for event in forth.ranks[0].of_kind("scale") if event["step"] == step)}
    return max((min((scale * value / change for scale in scales), key=_distance) for value in predicted), key=_distance)


def _distance(quotient: float) -> float:
    return abs(quotient - 1)


def _loss(record: RankRecord, step: int) -> float | None:
    """Returns the sum of the losses of a step, which may have several backward passes; None if one is no number."""
    losses = [event["loss"] for event in record.of_kind("backward") if event["step"] == step]
    return None if not losses or None in losses else sum(losses)


def _shares(forth: RankRecord, back: RankRecord, prefix: str) -> list[float]:
    """Returns by how much each parameter changes the loss from one run to the other, as its gradient tells."""
    found = []
    for name in (name.removeprefix("before/") for name in forth.tensors if name.startswith(f"before/{prefix}")):
        kind = next((kind for kind in ("unclipped", "applied") if f"{kind}/{name}" in forth.tensors), "")
        if kind and f"{kind}/{name}" in back.tensors:
            moved = forth.tensors[f"before/{name}"] - back.tensors[f"before/{name}"]
            gradient = (forth.tensors[f"{kind}/{name}"] + back.tensors[f"{kind}/{name}"]) / 2
            found.append(float(torch.sum(moved.double() * gradient.double())))
    return found
