"""What a check needs of a program before its silence says something.

A check names these in `NEEDS`: the first of them that is not met is why it is not made.
"""

from collections.abc import Callable
from types import ModuleType

from ddp_doctor.evidence.communication import own_models, own_weights
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.order import communicates, evaluation_epochs, indices_known, training_epochs
from ddp_doctor.findings import REASONS, Finding, cannot_tell, not_applicable, not_reached

# Returns why a check was not made, or None.
Requirement = Callable[[Evidence], Finding | None]


def need(met: Callable[[Evidence], bool], missing: Finding, *causes: Requirement) -> Requirement:
    """Returns a requirement: if it is not met, what is missing, or the first of its causes."""

    def requirement(evidence: Evidence) -> Finding | None:
        return None if met(evidence) else next((why for cause in causes if (why := cause(evidence))), missing)

    return requirement


optimizer_steps = need(
    lambda evidence: any(rank.of_kind("step") for rank in evidence.trained), not_reached("No optimizer steps.")
)
two_steps = need(
    lambda evidence: any(len(rank.of_kind("step")) > 1 for rank in evidence.trained),
    not_reached("The optimizers step fewer than two times."),
)
training_loader = need(
    lambda evidence: bool(training_epochs(evidence.ranks)),
    cannot_tell("The training batches come from no DataLoader, so it is not known which samples they have."),
    optimizer_steps,
)
map_style = need(
    lambda evidence: not all(event["iterable"] for rank in evidence.ranks for event in rank.training_epochs),
    not_reached("The training samples come from streams, which have no indices."),
    training_loader,
)
training_indices = need(
    lambda evidence: any(map(indices_known, training_epochs(evidence.ranks))),
    cannot_tell("The indices of the training samples are not known on all ranks."),
    map_style,
)
evaluation = need(
    lambda evidence: any(rank.evaluation_epochs for rank in evidence.ranks),
    not_reached("The program evaluates nothing through a DataLoader."),
)
evaluation_indices = need(
    lambda evidence: any(map(indices_known, evaluation_epochs(evidence.ranks))),
    cannot_tell("The indices of the evaluated samples are not known on all ranks."),
    evaluation,
)
wrapped = need(
    lambda evidence: any(rank.of_kind("ddp") for rank in evidence.ranks),
    not_reached("No module is wrapped in DistributedDataParallel."),
)


def several_ranks(evidence: Evidence) -> Finding | None:
    """The run with several ranks came to its end."""
    if evidence.worked("ranks"):
        return None
    run = evidence.failed("ranks")
    return cannot_tell(f"The run with several ranks {f'failed ({run.short_reason})' if run else 'was not made'}.")


def communicating(evidence: Evidence) -> Finding | None:
    """The ranks train one model together."""
    if communicates(evidence):
        return None
    if how := own_models(evidence):
        return not_applicable(f"Each rank trains a model of its own, {how}.")
    if any(rank.of_kind("init_process_group") for rank in evidence.ranks):
        return cannot_tell("No collective of the ranks was seen, so it is not known whether they train one model.")
    return not_applicable("The ranks do not communicate: each is a training run of its own.")


def averages_gradients(evidence: Evidence) -> Finding | None:
    """The ranks average gradients of whole parameters, not weights."""
    why = own_weights(evidence)
    return not_applicable(f"{why[0].upper()}{why[1:]}.") if why else None


def compared(evidence: Evidence) -> Finding | None:
    """The ranks were compared with one process."""
    why = evidence.reference.cannot
    missing = cannot_tell(f"The ranks and one process were not compared: {why}.") if why else None
    return averages_gradients(evidence) or missing


def compared_at_once(evidence: Evidence) -> Finding | None:
    """One process saw the samples of all ranks at once."""
    limits = evidence.reference.limits
    return compared(evidence) or (cannot_tell(f"{limits[0].upper()}{limits[1:]}.") if limits else None)


def batch_norm(evidence: Evidence) -> Finding | None:
    """A batch norm is in the model."""
    forwards = [event for rank in evidence.ranks for event in rank.of_kind("forward")]
    # What has modes and draws no numbers.
    if any(set(event["sensitive"]) - set(event["random"]) for event in forwards):
        return None
    if not forwards:
        return cannot_tell("No forward pass of a module was seen.")
    return not_reached("The model has no batch norm.")


def unmet(evidence: Evidence, *needs: Requirement) -> list[Finding]:
    """Returns why the first of these requirements is not met, as a check returns it; nothing if all are met."""
    return next(([missing] for need in needs if (missing := need(evidence))), [])


def ask(check: ModuleType, evidence: Evidence) -> list[Finding]:
    """Returns what a check finds, or why it was not made."""
    found: list[Finding] = unmet(evidence, *getattr(check, "NEEDS", ())) or check.check(evidence)
    # What was not reached before a rank failed may come later.
    silent = all(finding.verdict in REASONS for finding in found)
    return (unmet(evidence, several_ranks) if silent else []) or found
