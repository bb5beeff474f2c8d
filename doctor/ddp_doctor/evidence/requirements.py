"""What a check needs of a program before its silence says something.

A check names these in `NEEDS`. If it finds nothing, the first of them that is not met is why it was not made.
"""

from __future__ import annotations

from collections.abc import Callable

from ddp_doctor.evidence.communication import averaged_weights, own_models, shards
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import communicates, indices_known, training_epochs
from ddp_doctor.evidence.order import evaluation_epochs as evaluations
from ddp_doctor.findings import Finding, cannot_tell, not_applicable, not_reached

# Returns why a check was not made, or None.
Requirement = Callable[[Evidence], Finding | None]


def several_ranks(evidence: Evidence) -> Finding | None:
    """The run with several ranks came to its end."""
    if evidence.worked("ranks"):
        return None
    run = evidence.failed("ranks")
    why = f"failed ({run.short_reason})" if run else "was not made"
    return cannot_tell(f"The run with several ranks {why}.")


def communicating(evidence: Evidence) -> Finding | None:
    """The ranks train one model together."""
    if communicates(evidence):
        return None
    if how := own_models(evidence):
        return not_applicable(f"Each rank trains a model of its own, {how}.")
    if any(rank.of_kind("init_process_group") for rank in evidence.ranks):
        return cannot_tell("No collective of the ranks was seen, so it is not known whether they train one model.")
    return not_applicable("The ranks do not communicate: each is a training run of its own.")


def optimizer_steps(evidence: Evidence) -> Finding | None:
    """An optimizer steps."""
    if any(rank.of_kind("step") for rank in evidence.trained):
        return None
    return not_reached("No optimizer steps.")


def two_steps(evidence: Evidence) -> Finding | None:
    """Optimizers step more than once."""
    if any(len(rank.of_kind("step")) > 1 for rank in evidence.trained):
        return None
    return not_reached("The optimizers step fewer than two times.")


def training_loader(evidence: Evidence) -> Finding | None:
    """The training samples come from a DataLoader."""
    if training_epochs(evidence.ranks):
        return None
    if found := optimizer_steps(evidence):
        return found
    return cannot_tell("The training batches come from no DataLoader, so it is not known which samples they have.")


def map_style(evidence: Evidence) -> Finding | None:
    """The training samples have indices."""
    if not all(event["iterable"] for rank in evidence.ranks for event in rank.training_epochs):
        return None
    return training_loader(evidence) or not_reached("The training samples come from streams, which have no indices.")


def stream(evidence: Evidence) -> Finding | None:
    """The training samples come from a stream."""
    if any(event["iterable"] for rank in evidence.ranks for event in rank.training_epochs):
        return None
    return training_loader(evidence) or not_reached("No IterableDataset is trained on.")


def training_indices(evidence: Evidence) -> Finding | None:
    """All indices of a training epoch are known."""
    if any(indices_known(events) for events in training_epochs(evidence.ranks)):
        return None
    return map_style(evidence) or cannot_tell("The indices of the training samples are not known on all ranks.")


def evaluation(evidence: Evidence) -> Finding | None:
    """The program evaluates a DataLoader."""
    if any(rank.evaluation_epochs for rank in evidence.ranks):
        return None
    return not_reached("The program evaluates nothing through a DataLoader.")


def evaluation_indices(evidence: Evidence) -> Finding | None:
    """All indices of an evaluation are known."""
    if any(indices_known(events) for events in evaluations(evidence.ranks)):
        return None
    return evaluation(evidence) or cannot_tell("The indices of the evaluated samples are not known on all ranks.")


def wrapped(evidence: Evidence) -> Finding | None:
    """A module is wrapped in DistributedDataParallel."""
    if any(rank.of_kind("ddp") for rank in evidence.ranks):
        return None
    return not_reached("No module is wrapped in DistributedDataParallel.")


def no_sync(evidence: Evidence) -> Finding | None:
    """Backward passes skip the averaging."""
    passes = [event for rank in evidence.ranks for event in rank.of_kind("ddp_forward") if event["gradients"]]
    if any(not event["synchronizes"] for event in passes):
        return None
    return wrapped(evidence) or not_reached("no_sync is not used.")


def averages_gradients(evidence: Evidence) -> Finding | None:
    """The ranks average gradients of whole parameters, not weights."""
    if shards(evidence):
        return not_applicable("Each rank holds a part of the parameters only.")
    if how := averaged_weights(evidence):
        return not_applicable(f"The ranks average their weights ({how}), and train different weights between.")
    if how := own_models(evidence):
        return not_applicable(f"Each rank trains a model of its own, {how}.")
    return None


def compared(evidence: Evidence) -> Finding | None:
    """The ranks were compared with one process."""
    if found := averages_gradients(evidence):
        return found
    why = not_compared(evidence)
    return cannot_tell(f"The ranks and one process were not compared: {why}.") if why else None


def compared_at_once(evidence: Evidence) -> Finding | None:
    """One process saw the samples of all ranks at once."""
    if found := compared(evidence):
        return found
    limits = evidence.reference.limits
    return cannot_tell(f"{limits[0].upper()}{limits[1:]}.") if limits else None


def not_compared(evidence: Evidence) -> str:
    """Returns why the ranks were not compared with one process, in the user's words; empty if they were."""
    return evidence.reference.cannot


def batch_norm(evidence: Evidence) -> Finding | None:
    """A batch norm is in the model."""
    run = evidence.worked("numbers")
    outputs = [event["module"] for rank in (run.ranks if run else []) for event in rank.of_kind("output")]
    forwards = [event for rank in evidence.ranks for event in rank.of_kind("forward")]
    # What has modes and draws no numbers.
    others = any(set(event["sensitive"]) - set(event["random"]) for event in forwards)
    if others or any("BatchNorm" in module for module in outputs):
        return None
    if not forwards:
        return cannot_tell("No forward pass of a module was seen.")
    return not_reached("The model has no batch norm.")


def unmet(evidence: Evidence, needs: tuple[Requirement, ...]) -> Finding | None:
    """Returns the first of these requirements that is not met, after that of a run with several ranks."""
    return next((found for need in (several_ranks, *needs) if (found := need(evidence))), None)
