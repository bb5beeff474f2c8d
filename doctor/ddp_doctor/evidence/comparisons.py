"""The stage that compares the training steps of several ranks with those of one process."""

from ddp_doctor.evidence.communication import own_weights
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import owned
from ddp_doctor.evidence.rank_comparison import RankComparison
from ddp_doctor.findings import Comparison
from ddp_doctor.records.run import Run


def compare_training(evidence: Evidence) -> str:
    """Compares the first training steps, sets `evidence.reference`, and returns the outcome in one sentence."""
    cannot, single = own_weights(evidence), evidence.runs.get("single")
    if single and not single.worked:
        cannot = f"the code fails on one process ({single.short_reason})"
    elif not cannot and any(map(owned, evidence.trained)):
        cannot = "each rank owns parameters, which DistributedDataParallel is told to ignore"
    if cannot:
        reference = RankComparison(cannot=_repeat(evidence) or cannot)
    else:
        reference = evidence.compare()
        # What agrees with one process in 64 bits is deterministic.
        if reference.cannot or reference.differs:
            cannot = _repeat(evidence)
            reference = RankComparison(cannot=cannot) if cannot else evidence.compare()
    evidence.reference = reference
    if reference.cannot:
        return f"not compared: {reference.cannot}"
    bits = "64 bits" if evidence.double else "32 bits, because the code fails in 64 bits"
    outcome = f"in {bits}, the gradients of the ranks and of one process differ by {reference.difference:.1e}"
    return f"{outcome} ({reference.method}; {reference.limits})" if reference.limits else outcome


def _repeat(evidence: Evidence) -> str:
    """Repeats the run of several ranks; returns why no comparison is possible, or nothing.

    A program that gives other weights in forks is run without them.
    """
    again = evidence.again()
    if evidence.runner.forks and not _same_weights(evidence, again):
        evidence.runner.forks = False
        evidence.runs, evidence.double = {"ranks": evidence.runs["ranks"]}, True
        evidence.run("single", world_size=1)
        again = evidence.again()
    evidence.deterministic = again.worked and _same_weights(evidence, again)
    if not again.worked:
        return f"the second run with several ranks failed ({again.short_reason})"
    return "" if evidence.deterministic else "two runs of the same code gave different weights"


def _same_weights(evidence: Evidence, again: Run) -> bool:
    first, second = (
        [[event["weights"] for event in rank.of_kind("stepped")] for rank in run.ranks]
        for run in (evidence.runs["ranks"], again)
    )
    # A program that has no epochs is ended after a time, so one run may have more steps.
    pairs = (pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=False))
    return all(one == other for one, other in pairs)


def comparison_of(evidence: Evidence) -> Comparison:
    """Returns whether the ranks were compared with one process, how, or why not."""
    found = evidence.reference
    if reason := found.cannot:
        return Comparison(reason=reason)
    module = found.module if found.differs else ""
    return Comparison(True, found.method, "", found.differences, found.threshold, module)
