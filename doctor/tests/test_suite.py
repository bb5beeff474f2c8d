"""The planted faults are found with their codes; healthy projects and programs of installed packages have none."""

import ast

import pytest
from projects.cases import PROJECTS, Case
from suite import EVERYTHING, INSTALLED, examine_case

from ddp_doctor.faults import load_checks

QUICK = ("ld013_padded_tokens",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow) for case in EVERYTHING],
)
def test_exactly_the_planted_fault_is_found(case: Case) -> None:
    result = examine_case(case)
    listed = "\n".join(f"{found.code} {found.verdict.value}: {found.message}" for found in result.report.findings)
    assert result.is_right, f"expected {case.codes or 'no fault'}\n{listed}\n{result.report.error}{result.report.hang}"


def test_each_program_differs_and_each_table_and_fault_has_one() -> None:
    programs = EVERYTHING[: -len(INSTALLED)]
    assert len({(case.target, ast.unparse(ast.parse(case.text))) for case in programs}) == len(programs)
    assert len({case.name for case in programs}) == len(programs)
    assert {code for case in programs for code in case.codes} == set(load_checks())
    tables = {path.name: path.read_text() for path in PROJECTS.glob("*.txt")}
    assert all(path.name in "".join(tables.values()) for path in (PROJECTS / "bases").glob("*.py"))
    # test_emulation examines these.
    del tables["gpus.txt"]
    assert sum(table.count("\n## ") for table in tables.values()) == len(programs)
