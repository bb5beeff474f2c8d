"""Whether two runs of the same code on several ranks give the same weights."""

from __future__ import annotations

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.records.run import Run


def repeat(evidence: Evidence) -> str:
    """Repeats the run of several ranks, and returns the outcome."""
    again = _again(evidence)
    if not again.worked:
        evidence.deterministic = False
        return f"the second run failed: {again.short_reason}"
    evidence.deterministic = same = _same_weights(evidence, again)
    return "two runs gave bit-identical weights" if same else "two runs gave different weights"


def _again(evidence: Evidence) -> Run:
    """Makes the second run; in forks, if these give the same weights."""
    changes = {"branches": True}
    evidence.runner.use_forks()
    again = evidence.run("again", interventions=changes)
    if evidence.runner.forks and not _same_weights(evidence, again):
        evidence.runner.forks = False
        del evidence.runs["again"]
        again = evidence.run("again", interventions=changes)
    return again


def _same_weights(evidence: Evidence, again: Run) -> bool:
    first, second = (
        [[event["weights"] for event in rank.of_kind("stepped")] for rank in run.ranks]
        for run in (evidence.runs["ranks"], again)
    )
    # A program that has no epochs is ended after a time, so one run may have more steps.
    pairs = (pair for one, other in zip(first, second, strict=True) for pair in zip(one, other, strict=False))
    return all(one == other for one, other in pairs)
