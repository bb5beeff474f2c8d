"""A check is made, not reached, not applicable, or cannot tell, and what failed is said."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from recorded import END, both, epoch, event, evidence, failed, step

from ddp_doctor.errors import StoppedError
from ddp_doctor.evidence.comparisons import comparison_of
from ddp_doctor.evidence.rank_comparison import RankComparison
from ddp_doctor.examination import _Examination
from ddp_doctor.faults import load_checks
from ddp_doctor.files.protection import Protection
from ddp_doctor.findings import MADE, CheckState, Finding, Verdict, cannot_tell, fault, not_reached, note
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import PACKAGE

MISSING = not_reached("There is no validation.")


def ended(findings: Any, *needs: Finding, works: bool = True) -> tuple[list[Finding], CheckState]:
    """Returns what an examination makes of a check that finds this, or raises it."""

    def check(_: object) -> list[Finding]:
        if isinstance(findings, BaseException):
            raise findings
        return list(findings)

    required = tuple(lambda _, need=need: need for need in needs)
    checks: dict[str, ModuleType] = {
        "LD001": SimpleNamespace(NEEDS=required, check=check)  # type: ignore[dict-item]
    }
    ranks = both(step()) if works else failed("ValueError", "no data")
    examination = _Examination(evidence(ranks=ranks), checks)
    examination._check()
    return examination.findings, examination.states["LD001"]


@pytest.mark.parametrize(
    ("case", "verdicts", "state", "reason"),
    [
        (([],), [], MADE, ""),
        (([], MISSING), [], Verdict.NOT_REACHED, "There is no validation."),
        (([fault("Wrong.")],), [Verdict.FAULT], MADE, ""),
        # A check is not asked without what it needs.
        (([fault("Wrong.")], MISSING), [], Verdict.NOT_REACHED, "There is no validation."),
        (([note("Odd."), cannot_tell("It is random.")],), [Verdict.NOTE], Verdict.CANNOT_TELL, "It is random."),
        ((KeyError("x"),), [], Verdict.CANNOT_TELL, "The check failed: KeyError: 'x'"),
    ],
    ids=["made", "not reached", "found", "not asked", "a note", "a defect"],
)
def test_a_check_ends_in_a_state(case: Any, verdicts: list[Verdict], state: str, reason: str) -> None:
    findings, ends = ended(*case)
    assert [finding.verdict for finding in findings] == verdicts
    assert ends == CheckState("LD001", state, reason)


@pytest.mark.parametrize("findings", [[], [not_reached("No scaler is used.")]])
def test_after_a_rank_has_failed_nothing_is_called_not_reached(findings: list[Finding]) -> None:
    _, state = ended(findings, works=False)
    assert state.state == Verdict.CANNOT_TELL
    assert "ValueError: no data" in state.reason
    assert ended([fault("Wrong.")], works=False)[1].state == MADE


def test_a_signal_within_a_check_ends_the_examination() -> None:
    with pytest.raises(StoppedError):
        ended(StoppedError(signal.SIGTERM))


def test_every_check_says_what_it_needs() -> None:
    """Of a program that only imports torch, files and groups alone are known."""
    examination = _Examination(evidence(ranks=both(END)), load_checks())
    examination._check()
    assert [code for code, state in examination.states.items() if not state.reason] == ["LD032"]


def test_the_report_says_why_one_process_was_not_compared() -> None:
    told = comparison_of(evidence(RankComparison(cannot="it hung")))
    assert (told.made, told.reason) == (False, "it hung")
    told = comparison_of(evidence(RankComparison(difference=0.5, differences=(0.5,), module="net.norm")))
    assert (told.made, told.differences, told.module) == (True, (0.5,), "net.norm")


@pytest.mark.parametrize("works", [True, False])
def test_code_that_fails_on_one_process_is_run_on_several(works: bool, tmp_path: Path) -> None:
    wrong = failed("ValueError", "devices=2 does not match the world size 1")
    several = both(epoch(trains=False), END) if works else [*wrong, *wrong]
    given = evidence(otherwise=lambda spec: wrong if spec.world_size == 1 else several)
    examination = _Examination(given, {}).first_runs()
    examination.finish()
    report = examination.report("mine:main", 0.0, Protection(tmp_path))
    assert report.exit_code == (0 if works else 2)
    assert "devices=2 does not match" in report.stages[0].outcome
    assert bool(report.error) is not works


def failing(rank: int, kind: str, message: str) -> RankRecord:
    trace = (
        'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n    step()\n    ^^^^^^\n'
        f'  File "{PACKAGE}/probes/wrap.py", line 39, in call\n    return around(original)\n           ^^^^^^\n'
        f'  File "torch/nn.py", line 1, in forward\n    raise\n{kind}: {message}'
    )
    return RankRecord(rank, [event("error", type=kind, message=message, trace=trace, input=False)])


def test_the_rank_that_failed_first_is_named_before_those_that_lost_it() -> None:
    lost = failing(0, "RuntimeError", "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:55948")
    run = Run(evidence().spec, Path(), [lost, failing(1, "ValueError", "bad sample 17")])
    assert run.short_reason == "rank 1: ValueError: bad sample 17"
    assert run.reason.endswith("ValueError: bad sample 17")
    assert run.stacks.index("Rank 1 failed") < run.stacks.index("Rank 0 failed")
    # The user's frames alone.
    assert PACKAGE not in run.reason
    assert run.reason.count('File "') == 2


@pytest.mark.parametrize(
    ("record", "ended_early"),
    [(failing(0, "ValueError", "no file"), False), (RankRecord(0, code=0), True), (RankRecord(0, code=1), False)],
)
def test_how_a_run_failed_is_known(record: RankRecord, ended_early: bool) -> None:
    run = Run(evidence().spec, Path(), [record])
    assert run.ended_early == ended_early
