"""Which gradients the ranks share: compares what the optimizers of the ranks got with what each rank computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_doctor.evidence.communication import (
    HookEffect,
    averaged_weights,
    averaged_weights_of,
    hook_effects,
    own_models,
    shards,
)
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import SAME, RankComparison, distance, is_multiple, names_of
from ddp_doctor.lazy import torch
from ddp_doctor.records.run import RankRecord


@dataclass(frozen=True)
class Divergence:
    """The first step after which the ranks no longer train the same weights.

    Attributes:
        step: The step, from 0.
        kind: `steps` (one rank does not step), `scaled` (one rank scales the shared gradient), `local` (each rank uses
            its own gradient), `partly` (some parameters use that of the rank, others a shared one), `other`.
        parameters: Names of the parameters whose gradients differ, in order.
        amount: Largest relative difference of a gradient between the ranks.
        place: The user's place of the optimizer step.
        passes: The forward passes through DistributedDataParallel with gradients before the step.
        hook: The communication hook that gives each rank its own gradient back in the step, or None.
    """

    step: int
    kind: str
    parameters: tuple[str, ...] = ()
    amount: float = 0.0
    place: str = ""
    passes: Sequence[dict[str, Any]] = ()
    hook: HookEffect | None = None

    @property
    def tensor(self) -> str:
        """The first of the parameters."""
        return next(iter(self.parameters), "")

    @property
    def measured(self) -> str:
        """The amount in words, or nothing."""
        return f"the gradients of two ranks differ by {self.amount:.1e}" if self.amount else ""


def first_divergence(evidence: Evidence) -> Divergence | None:
    """Returns how the ranks begin to train different weights, or None if they do not, or average them later.

    Parameters that each rank owns are meant to differ.
    """
    found = None if _are_meant_to_differ(evidence) else _first_of(evidence.trained)
    hooks = hook_effects(evidence.worked("ranks")) if found else []
    hook = next((hook for hook in hooks if found and hook.step == found.step and hook.local), None)
    return replace(found, hook=hook) if found else None


def _are_meant_to_differ(evidence: Evidence) -> bool:
    return bool(shards(evidence) or averaged_weights(evidence) or own_models(evidence))


def skipping_rank(evidence: Evidence) -> int | None:
    """Returns the rank that skips the step after which the weights of the ranks differ, or None.

    It takes its next step after more backward passes than the others. Ranks whose weights stay equal may have unequal
    numbers of micro-batches.
    """
    found = first_divergence(evidence)
    if found is None or found.kind in {"local", "partly", "steps"}:
        return None
    steps = [rank.of_kind("step")[found.step : found.step + 1] for rank in evidence.trained]
    passes = [len(event.get("passes", ())) for events in steps for event in events]
    return passes.index(max(passes)) if len(set(passes)) > 1 else None


def owned(rank: RankRecord) -> set[str]:
    """Returns the keys of the parameters that each rank trains by itself on request: DDP was told to ignore them."""
    ignored = {name for event in rank.of_kind("ddp") for name in event.get("ignored", ())}
    return {key for key, name in names_of(rank).items() if name in ignored}


def later_divergence(evidence: Evidence) -> Divergence | None:
    """Returns the same for a run of more steps, whose tensors are not recorded: what begins later is seen as well."""
    if not evidence.trained or _are_meant_to_differ(evidence):
        return None
    many = evidence.later()
    # Averages may begin late as well.
    found = _first_of(many.ranks) if many.worked and not averaged_weights_of(many) else None
    # The time may be over on one rank a step earlier.
    return None if found and found.kind == "steps" else found


def _first_of(ranks: Sequence[RankRecord]) -> Divergence | None:
    if not ranks:
        return None
    meant, steps = owned(ranks[0]), range(len(ranks[0].of_kind("step")))
    found = next((found for other in ranks[1:] if (found := _divergence(ranks[0], other, meant))), None)
    found = found or next((found for step in steps if (found := _of_parts(ranks, step))), None)
    return replace(found, passes=passes_of(ranks[0], found.step)) if found else None


def _divergence(first: RankRecord, second: RankRecord, meant: Collection[str]) -> Divergence | None:
    ranks = first, second
    # As soon as a rank has joined, those of the others have other numbers.
    last = min((event["step"] for rank in ranks for event in rank.of_kind("joined")), default=None)
    steps, stepped = ([rank.of_kind(kind)[:last] for rank in ranks] for kind in ("step", "stepped"))
    for number, (a, b) in enumerate(zip(*stepped, strict=False)):
        keys = [key for key in {**a["weights"], **b["weights"]} if key not in meant]
        if different := [key for key in keys if a["weights"].get(key) != b["weights"].get(key)]:
            place = steps[0][number]["place"] if number < len(steps[0]) else ""
            return _classify(first, second, number, different, place, meant)
    if len(stepped[0]) != len(stepped[1]):
        step = min(map(len, stepped))
        longer = steps[0] if len(steps[0]) > step else steps[1]
        return Divergence(step, "steps", place=longer[step]["place"])
    return None


def _classify(
    first: RankRecord, second: RankRecord, step: int, different: list[str], place: str, meant: Collection[str]
) -> Divergence:
    names, known = names_of(first), dict[str, Any]()
    for key in (key for key in names if key not in meant):
        pairs = [
            [record.tensors.get(f"{what}/{step}/{key}") for record in (first, second)] for what in ("applied", "local")
        ]
        if all(tensor is not None for pair in pairs for tensor in pair):
            known[key] = pairs
    unequal = [key for key, (applied, _) in known.items() if not torch.equal(*applied)]
    if not unequal:
        # The gradients are equal, but the weights were not, or the optimizers are different.
        return Divergence(step, "other", tuple(names[key] for key in different if key in names), place=place)
    own = all(is_multiple(applied, local) for key in unequal for applied, local in zip(*known[key], strict=True))
    trivial = all(is_multiple(*known[key][1]) for key in unequal)
    kind = "scaled" if all(is_multiple(*known[key][0]) for key in unequal) else "other"
    if not trivial and own:
        kind = "partly" if len(known) > len(unequal) else "local"
    amount = max(distance(*known[key][0]) for key in unequal)
    return Divergence(step, kind, tuple(names[key] for key in unequal), amount, place)


def _of_parts(ranks: Sequence[RankRecord], step: int) -> Divergence | None:
    """Returns how the gradients of a step differ if each rank updates a part of the parameters for all of them.

    The weights of the ranks are then equal whatever their gradients are. Each part must be updated with the mean
    gradient of the ranks, or with the same multiple of it.
    """
    names, events = names_of(ranks[0]), [rank.of_kind("part") for rank in ranks]
    parts = [{key for event in of for key in event["keys"] if event["step"] == step} & names.keys() for of in events]
    if not all(parts) or sum(map(len, parts)) > len(set().union(*parts)):
        return None
    scales, own = dict[str, float](), list[str]()
    for rank, key in ((rank, key) for rank, part in zip(ranks, parts, strict=True) for key in sorted(part)):
        applied, local = (rank.tensors.get(f"{what}/{step}/{key}") for what in ("applied", "local"))
        locals_of_all = [found for other in ranks if (found := other.tensors.get(f"local/{step}/{key}")) is not None]
        if applied is None or local is None or len(locals_of_all) < len(ranks):
            return None
        mean = torch.stack(locals_of_all).double().mean(0)
        if is_multiple(applied, mean):
            scales[key] = float(applied.norm() / mean.norm()) if mean.any() else 1.0
        elif is_multiple(applied, local):
            own.append(key)
        else:
            # Compressed, or with what earlier steps left.
            return None
    place = ranks[0].of_kind("step")[step]["place"]
    if own:
        return Divergence(step, "local", tuple(names[key] for key in own), place=place)
    amount = 1 - min(scales.values()) / max(scales.values()) if all(scales.values()) else 0.0
    return Divergence(step, "scaled", tuple(names[key] for key in scales), amount, place) if amount > SAME else None


def own_clip(evidence: Evidence) -> tuple[dict[str, Any], list[float]] | None:
    """Returns the first clipping of gradients that are not averaged yet, with the norm of each rank, or None.

    The average has the same norm on all ranks.
    """
    if first_divergence(evidence) or averaged_weights(evidence) or own_models(evidence):
        return None
    clips = [[event for event in rank.of_kind("clip") if event["norm"] is not None] for rank in evidence.trained]
    for events in zip(*clips, strict=False):
        norms = [event["norm"] for event in events]
        active = any(norm > event["limit"] for norm, event in zip(norms, events, strict=True))
        if active and max(norms) - min(norms) > SAME * max(norms):
            return events[0], norms
    return None


def passes_of(record: RankRecord, step: int) -> list[dict[str, Any]]:
    """Returns the forward passes through DistributedDataParallel with gradients before an optimizer step."""
    found: list[dict[str, Any]] = []
    number = 0
    for event in record.of_kind("ddp_forward", "step"):
        if event["kind"] == "step":
            number += 1
        elif event["gradients"] and number == step:
            found.append(event)
    return found


def without_batch_norm(evidence: Evidence) -> RankComparison:
    """Returns the comparison with synchronized batch norm, if batch norm is what differs first."""
    found = evidence.reference
    if found.differs and found.module_class.startswith("BatchNorm"):
        return evidence.compare("synchronized batch norm", sync_batch_norm=True)
    return found


def loss_place(evidence: Evidence) -> str:
    """Returns the user's place of the loss: of the first backward pass, or of the training step of a module."""
    events = evidence.ranks[0].of_kind("backward") if evidence.ranks else []
    places = [event["place"] for event in events if event["place"]]
    if not places and (run := evidence.worked("numbers")):
        found = [event["place"] for event in run.ranks[0].of_kind("output", "log") if event["place"]]
        places = [place for place in found if place.endswith(" in training_step")] or found[-1:]
    return places[0] if places else ""
