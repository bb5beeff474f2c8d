"""What the doctor found: findings with a verdict, evidence and place, and the report that holds them.

Nothing here imports torch: the command line reads a report without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from math import isfinite
from typing import Any

# The first words of `error` or `hang` of a report if the fault is the doctor's.
DEFECT = "The program runs without the doctor, but fails under it"


class Verdict(StrEnum):
    """What a finding says, the most serious first."""

    FAULT = "fault"
    DEPENDS = "depends on the number of devices"
    UNCLEAR = "unclear"
    NOTE = "note"
    CANNOT_TELL = "cannot tell"
    NOT_APPLICABLE = "not applicable"
    NOT_REACHED = "not reached"


# These say why a check was not made, and are no findings of a report.
REASONS = (Verdict.CANNOT_TELL, Verdict.NOT_APPLICABLE, Verdict.NOT_REACHED)
MADE = "made"


@dataclass(frozen=True)
class Finding:
    """One observation of a check.

    Attributes:
        code: Code of the check, such as `LD001`.
        verdict: What the observation means.
        message: One or two sentences with the evidence: what was observed, on which rank, by how much.
        step: Optimizer step (from 0) in which it was first seen; None if it belongs to no step.
        tensor: Name of the parameter, module or metric; empty if there is none.
        amount: The measured number, with its meaning, such as `2.4e-2 of the gradient`; empty if there is none.
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


# A finding with each verdict; the examination adds the code of the check. The last three are reasons.
fault, depends, unclear, note, cannot_tell, not_applicable, not_reached = (
    partial(Finding, "", verdict) for verdict in Verdict
)


@dataclass(frozen=True)
class CheckState:
    """How a check ended.

    Attributes:
        code: Code of the check.
        state: `made`. `not reached`: the program does not do what it examines. `not applicable`: its property has no
            meaning in this program. `cannot tell`: it could not be measured.
        reason: Why it was not made, in one or two sentences; empty if it was.
    """

    code: str
    state: str = MADE
    reason: str = ""

    @classmethod
    def of(cls, code: str, found: Sequence[Finding]) -> CheckState:
        """Returns the state of a check that has found this; the first reason counts."""
        told = [finding for finding in found if finding.verdict is not Verdict.NOTE]
        first = min(told, key=lambda finding: list(Verdict).index(finding.verdict), default=None)
        if first is not None and first.verdict in REASONS:
            return cls(code, first.verdict, first.message)
        return cls(code)


@dataclass(frozen=True)
class Accepted:
    """A finding that the user accepts.

    Attributes:
        finding: The finding.
        by: `comment` in the source line, or `baseline`.
        reason: Why, in the user's words; of a baseline, its file.
    """

    finding: Finding
    by: str
    reason: str


@dataclass(frozen=True)
class Stage:
    """One stage of the examination.

    Attributes:
        name: Such as `several ranks`.
        outcome: What was seen, such as `6 optimizer steps on each of 2 ranks`.
        seconds: How long it took.
    """

    name: str
    outcome: str
    seconds: float


@dataclass(frozen=True)
class Files:
    """How the user's files were kept from the examined code.

    Attributes:
        protection: `private view`: the kernel showed a copy-on-write view of all files. `copy`: the code ran in a copy
            of the current folder. Empty if nothing was run.
        not_covered: What this does not protect, in sentences.
        remote: The addresses on other machines that the code connected to. What it wrote there is written.
    """

    protection: str = ""
    not_covered: Sequence[str] = ()
    remote: Sequence[str] = ()


@dataclass(frozen=True)
class Comparison:
    """The comparison of the ranks with one process that gets their samples.

    Attributes:
        made: Whether it was made.
        method: How one process was given the samples of the ranks.
        reason: Why it was not made; empty if it was.
        differences: For each step, the largest difference of a gradient, relative to the largest gradient.
        threshold: A larger difference is not rounding.
        module: The first module whose outputs differ; empty if there is none.
    """

    made: bool = False
    method: str = ""
    reason: str = ""
    differences: Sequence[float] = ()
    threshold: float = 0.0
    module: str = ""


@dataclass(frozen=True)
class Report:
    """The result of an examination.

    `report` is what `examine` returns:

        for finding in report.of(Verdict.FAULT, Verdict.UNCLEAR):
            print(finding.code, finding.message, finding.place)
        report.to_json()["exit_code"]  # 0 without a fault

    Attributes:
        target: What was examined, as it was named.
        devices: Number of ranks.
        findings: What the checks found, the most serious first.
        stages: The stages in their order.
        checks: How each wanted check ended.
        comparison: The comparison with one process; None if no wanted check needs it.
        accepted: Findings that the user accepts; they change no exit code.
        error: Why the code could not be examined: its own traceback, or a message; empty if it could.
        hang: The stacks of the ranks if one hung or was lost; empty otherwise.
        seconds: How long the examination took.
        versions: Versions of Python and of the libraries in use.
        files: How the user's files were kept from the examined code.
        emulated_gpus: Number of GPUs that were emulated on the CPU; 0 if the code was run as it is.
    """

    target: str
    devices: int
    findings: Sequence[Finding] = ()
    stages: Sequence[Stage] = ()
    checks: Sequence[CheckState] = ()
    comparison: Comparison | None = None
    accepted: Sequence[Accepted] = ()
    error: str = ""
    hang: str = ""
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    emulated_gpus: int = 0

    def of(self, *verdicts: Verdict) -> list[Finding]:
        """Returns the findings with one of these verdicts."""
        return [finding for finding in self.findings if finding.verdict in verdicts]

    def ended(self, state: str) -> list[CheckState]:
        """Returns the checks that ended in a state."""
        return [check for check in self.checks if check.state == state]

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
        told = {**asdict(self), "format": 2, "exit_code": self.exit_code}
        if self.comparison:
            # JSON has no infinity.
            finite = [value if isfinite(value) else None for value in self.comparison.differences]
            told["comparison"]["differences"] = finite
        return told


def listed(names: Sequence[str], most: int = 3) -> str:
    """Returns names as `a, b and c`, or `a, b, c and 4 more`."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
