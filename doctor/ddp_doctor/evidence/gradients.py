"""Which gradients the ranks share: compares what the optimizers of the ranks got with what each rank computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_doctor.evidence.communication import averaged_weights, own_weights
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import RankComparison, distance, is_multiple, names_of
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
    """

    step: int
    kind: str
    parameters: tuple[str, ...] = ()
    amount: float = 0.0
    place: str = ""
    passes: Sequence[dict[str, Any]] = ()

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
    return None if own_weights(evidence) else _first_of(evidence.trained)


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
    if not evidence.trained or own_weights(evidence):
        return None
    many = evidence.later()
    # Averages may begin late as well.
    found = _first_of(many.ranks) if many.worked and not averaged_weights(many) else None
    # The time may be over on one rank a step earlier.
    return None if found and found.kind == "steps" else found


def _first_of(ranks: Sequence[RankRecord]) -> Divergence | None:
    if not ranks:
        return None
    meant = owned(ranks[0])
    found = next((found for other in ranks[1:] if (found := _divergence(ranks[0], other, meant))), None)
    return replace(found, passes=passes_of(ranks[0], found.step)) if found else None


def _divergence(first: RankRecord, second: RankRecord, meant: Collection[str]) -> Divergence | None:
    ranks = first, second
    # As soon as a rank has joined, those of the others have other numbers.
    last = min((event["step"] for rank in ranks for event in rank.of_kind("joined")), default=None)
    steps, stepped = ([rank.of_kind(kind)[:last] for rank in ranks] for kind in ("step", "stepped"))
    # If each rank updates a part of the parameters for all, their weights are equal whatever the gradients are.
    shared = {event["step"] for event in first.of_kind("part")}
    for number, (a, b) in enumerate(zip(*stepped, strict=False)):
        keys = [key for key in {**a["weights"], **b["weights"]} if key not in meant]
        different = [key for key in keys if a["weights"].get(key) != b["weights"].get(key)]
        if number in shared:
            applied = {key: [record.tensors.get(f"applied/{number}/{key}") for record in ranks] for key in keys}
            known = {key: [one for one in pair if one is not None] for key, pair in applied.items()}
            different += [key for key, pair in known.items() if len(pair) == len(ranks) and not torch.equal(*pair)]
        if different:
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


def passes_of(record: RankRecord, step: int) -> list[dict[str, Any]]:
    """Returns the forward passes through DistributedDataParallel with gradients before an optimizer step."""
    return [event for event in record.of_kind("ddp_forward") if event["gradients"] and event["step"] == step]


def without_batch_norm(evidence: Evidence) -> RankComparison:
    """Returns the comparison with synchronized batch norm, if batch norm is what differs first."""
    found = evidence.reference
    if found.differs and found.module_class.startswith("BatchNorm"):
        return evidence.compare(sync_batch_norm=True)
    return found


def loss_place(evidence: Evidence) -> str:
    """Returns the user's place of the loss: of the first backward pass, or of the training step of a module."""
    events = evidence.ranks[0].of_kind("backward") if evidence.ranks else []
    places = [event["place"] for event in events if event["place"]]
    if not places and (run := evidence.worked("numbers")):
        found = [event["place"] for event in run.ranks[0].of_kind("output", "log") if event["place"]]
        places = [place for place in found if place.endswith(" in training_step")] or found[-1:]
    return places[0] if places else ""
