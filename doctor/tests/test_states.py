"""A check is made, not reached, not applicable, or cannot tell, and what failed is said."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from recorded import END, both, evidence, failed, step

from ddp_doctor.examination import _Examination
from ddp_doctor.faults import load_checks
from ddp_doctor.findings import CheckState, Finding, State, Verdict, cannot_tell, fault, not_reached, note

MISSING = not_reached("There is no validation.")


def ended(findings: Any, *needs: Finding, works: bool = True) -> tuple[list[Finding], CheckState]:
    """Returns what an examination makes of a check that finds this, or raises it."""

    def check(_: object) -> list[Finding]:
        if isinstance(findings, BaseException):
            raise findings
        return list(findings)

    required = tuple(lambda _, need=need: need for need in needs)
    checks: dict[str, ModuleType] = {
        "LD001": SimpleNamespace(CODE="LD001", STRUCTURAL=True, NEEDS=required, check=check)  # type: ignore[dict-item]
    }
    ranks = both(step()) if works else failed("ValueError", "no data")
    examination = _Examination(evidence(ranks=ranks), checks)
    examination._check()
    return examination.findings, examination.states["LD001"]


@pytest.mark.parametrize(
    ("case", "verdicts", "state", "reason"),
    [
        (([],), [], State.MADE, ""),
        (([], MISSING), [], State.NOT_REACHED, "There is no validation."),
        (([fault("Wrong.")],), [Verdict.FAULT], State.MADE, ""),
        # A check is not asked without what it needs.
        (([fault("Wrong.")], MISSING), [], State.NOT_REACHED, "There is no validation."),
        (([note("Worth knowing."), cannot_tell("It is random.")],), [Verdict.NOTE], State.CANNOT_TELL, "It is random."),
        ((KeyError("x"),), [], State.CANNOT_TELL, "The check failed: KeyError: 'x'"),
    ],
    ids=["made", "not reached", "found", "not asked", "a note", "a defect"],
)
def test_a_check_ends_in_a_state(case: Any, verdicts: list[Verdict], state: State, reason: str) -> None:
    findings, ends = ended(*case)
    assert [finding.verdict for finding in findings] == verdicts
    assert ends == CheckState("LD001", state, reason)


@pytest.mark.parametrize("findings", [[], [not_reached("No scaler is used.")]])
def test_after_a_rank_has_failed_nothing_is_called_not_reached(findings: list[Finding]) -> None:
    _, state = ended(findings, works=False)
    assert state.state is State.CANNOT_TELL
    assert "ValueError: no data" in state.reason
    assert ended([fault("Wrong.")], works=False)[1].state is State.MADE


def test_every_check_says_what_it_needs() -> None:
    """Of a program that only imports torch, files and groups alone are known."""
    examination = _Examination(evidence(ranks=both(END)), load_checks())
    examination._check()
    assert [code for code, state in examination.states.items() if not state.reason] == ["LD032"]
