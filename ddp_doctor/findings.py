"""What the doctor found: findings with a verdict, evidence and place, and the report that holds them.

Nothing here imports torch: the command line reads a report without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any


class Verdict(StrEnum):
    """What a finding says, the most serious first."""

    FAULT = "fault"
    DEPENDS = "depends on the number of devices"
    UNCLEAR = "unclear"
    NOTE = "note"
    CANNOT_TELL = "cannot tell"
    NOT_REACHED = "not reached"


@dataclass(frozen=True)
class Finding:
    """One observation of a check.

    Attributes:
        code: Code of the check, such as `LD001`.
        verdict: What the observation means.
        message: One or two sentences with the evidence: what was observed, on which rank, by how much.
        step: Optimizer step (from 0) in which it was first seen; None if it belongs to no step.
        tensor: Name of the parameter, module or metric; empty if there is none.
        amount: The measured number, with its meaning, such as `2.4e-2 of the update`; empty if there is none.
        place: The user's `file:line in function`; empty if it is not known.
        proof: What the intervention showed, such as `with synchronized batch norm the difference falls from 2.4e-02 to
            1.1e-15`; empty if there was none.
    """

    code: str
    verdict: Verdict
    message: str
    step: int | None = None
    tensor: str = ""
    amount: str = ""
    place: str = ""
    proof: str = ""


# A finding with each verdict; the examination adds the code of the check.
fault, depends, unclear, note, cannot_tell, not_reached = (partial(Finding, "", verdict) for verdict in Verdict)


@dataclass(frozen=True)
class Stage:
    """One stage of the examination.

    Attributes:
        name: Such as `determinism`.
        outcome: One sentence, such as `two runs gave bit-identical weights`.
        seconds: How long it took.
    """

    name: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Files:
    """How the user's files were kept from the examined code.

    Attributes:
        protection: `private view`: the kernel showed a copy-on-write view of all files. `redirected writes`: the calls
            of Python were redirected. Empty if nothing was run.
        not_covered: What this does not protect, in sentences.
        kept: The folder with the files that the code wrote; empty if they were removed.
        remote: The addresses on other machines that the code connected to. What it wrote there is written.
    """

    protection: str = ""
    not_covered: Sequence[str] = ()
    kept: str = ""
    remote: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The result of an examination.

    Attributes:
        target: What was examined, as it was named.
        devices: Number of ranks.
        findings: All findings, the most serious first.
        stages: The stages in their order.
        checks: The codes that were checked.
        error: Why the code could not be examined: its own traceback, or a message; empty if it could.
        hang: The stacks of the ranks if one hung or was lost; empty otherwise.
        seconds: How long the examination took.
        versions: Versions of Python and of the libraries in use.
        files: How the user's files were kept from the examined code.
    """

    target: str
    devices: int
    findings: Sequence[Finding] = ()
    stages: Sequence[Stage] = ()
    checks: Sequence[str] = ()
    error: str = ""
    hang: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    files: Files = Files()

    def of(self, *verdicts: Verdict) -> list[Finding]:
        """Returns the findings with one of these verdicts."""
        return [finding for finding in self.findings if finding.verdict in verdicts]

    @property
    def faults(self) -> list[Finding]:
        """The findings that are faults. `assert not report.faults` is a test."""
        return self.of(Verdict.FAULT)

    @property
    def exit_code(self) -> int:
        """0: no fault; 1: a fault; 2: the code fails on one process; 3: a rank hung or was lost."""
        if self.hang:
            return 3
        if self.error:
            return 2
        return 1 if self.faults else 0

    def to_json(self) -> dict[str, Any]:
        """Returns the report as plain values, in the form of ddp_doctor/report.schema.json."""
        findings = [{**asdict(finding), "verdict": finding.verdict.value} for finding in self.findings]
        return {**asdict(self), "findings": findings, "format": 1, "exit_code": self.exit_code}


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns names as `a, b and c`, or `a, b, c and 4 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
