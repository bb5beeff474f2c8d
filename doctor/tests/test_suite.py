"""The planted faults are found with their codes; healthy projects and programs of installed packages have none."""

from __future__ import annotations

import pytest
from projects.cases import CASES, Case
from projects.families import FAULTY, HEALTHY
from suite import INSTALLED, TRAINCHECK, examine_case

ALL = (*CASES, *FAULTY, *HEALTHY, *TRAINCHECK, *INSTALLED)
# The comparison with one process, evaluation, and a communication hook.
QUICK = ("ld013_padded_tokens",)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in ALL],
)
def test_exactly_the_planted_fault_is_found(case: Case) -> None:
    result = examine_case(case)
    listed = "\n".join(
        f"{finding.code} {finding.verdict.value}: {finding.message}" for finding in result.report.findings
    )
    assert result.is_right, f"expected {case.codes or 'no fault'}\n{listed}\n{result.report.error}{result.report.hang}"
