"""A check is made, not reached, not applicable, or cannot tell, and each state has its reason."""

from __future__ import annotations

import signal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from test_checks import Event, Recorded, event, evidence, reason, records

from ddp_doctor.errors import StoppedError
from ddp_doctor.evidence.comparisons import comparison_of
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import RankComparison
from ddp_doctor.examination import _Examination
from ddp_doctor.faults import load_checks
from ddp_doctor.findings import CheckState, Finding, State, Verdict, cannot_tell, fault, not_reached, note

STEP: dict[str, Any] = {
    "names": {},
    "optimizer": 0,
    "frozen": [],
    "stale": [],
    "unowned": {},
    "loaded": [],
    "lr": [0.1],
}
EPOCH: dict[str, Any] = {
    "trains": True, "iterable": False, "drained": True, "indices": [0, 1, 2], "base": 0, "loader": 0, "iteration": 0,
    "set_epoch": ["DistributedSampler"], "sampler": "DistributedSampler", "dataset": "Digits", "sizes": [2, 1],
    "worker_generators": [], "workers": 0, "batches": 2, "yielded": 2, "complete": True, "epoch": 0,
}  # fmt: skip


def epoch(**values: Any) -> Event:
    return event("epoch", **(EPOCH | values))


def given(*events: Event) -> Evidence:
    """Returns the evidence of two ranks with the same events, which communicate."""
    own = [event("collective", op="all_reduce", value=None), *events]
    return evidence(ranks=records(own, own))


STEPS = [event("step", step, **STEP) for step in (0, 1)]


@pytest.mark.parametrize(
    ("code", "events", "said"),
    [
        ("LD001", [*STEPS, epoch()], "not reached: No data set is trained on for a second epoch"),
        ("LD001", [*STEPS, epoch(), epoch(iteration=1, set_epoch=[])], "not reached: No sampler and no data set"),
        ("LD001", [*STEPS, epoch(), epoch(iteration=1)], ""),
        ("LD001", STEPS, "cannot tell: The training batches come from no DataLoader"),
        ("LD001", [], "not reached: No optimizer steps"),
        ("LD003", [*STEPS, epoch()], "not reached: No IterableDataset"),
        ("LD009", STEPS, ""),
        ("LD009", [], "not reached: No optimizer steps"),
        ("LD016", STEPS, "not reached: No module is wrapped"),
        ("LD020", STEPS[:1], "not reached: The optimizers step fewer"),
        ("LD023", STEPS, "not reached: The program evaluates nothing"),
        ("LD023", [*STEPS, epoch(trains=False, drained=False)], "cannot tell: The indices of the evaluated"),
        ("LD028", [*STEPS, epoch(), event("join")], "not applicable: The program trains with Join"),
        ("LD028", [*STEPS, epoch(iterable=True, drained=False)], "cannot tell: The numbers of batches"),
    ],
)
def test_the_reason_says_what_the_program_does(code: str, events: list[Event], said: str) -> None:
    found = reason(code, given(*events))
    assert found.startswith(said) if said else not found


def test_independent_runs_share_nothing_on_purpose() -> None:
    alone = evidence(ranks=records([*STEPS, epoch()], [*STEPS, epoch()]))
    assert reason("LD002", alone).startswith("not applicable: The ranks do not communicate")
    # Collectives that are not seen are not proved to be missing.
    group = [event("init_process_group", direct=True), *STEPS, epoch()]
    assert reason("LD002", evidence(ranks=records(group, group))).startswith("cannot tell: No collective")
    sharded = [event("step", **(STEP | {"sharded": True})), epoch()]
    assert not reason("LD002", evidence(ranks=records(sharded, sharded)))


def ended(found: Any, *, needs: tuple[Any, ...] = (), ranks: bool = True) -> tuple[list[Finding], CheckState]:
    """Returns what an examination makes of a check that finds this, or raises it."""

    def check(_: Evidence) -> list[Finding]:
        if isinstance(found, Exception):
            raise found
        return list(found)

    module: Any = SimpleNamespace(CODE="LD001", STRUCTURAL=True, NEEDS=needs, check=check)
    checks: dict[str, ModuleType] = {"LD001": module}
    failed = [event("error", type="ValueError", message="no data", trace="Traceback", input=False)]
    own = evidence(ranks=records(STEPS, STEPS) if ranks else records(failed))
    examination = _Examination(own, checks, Path())
    examination._check()
    return examination.findings, examination.states["LD001"]


def test_a_check_without_findings_was_made_only_if_it_had_what_it_needs() -> None:
    assert ended([])[1] == CheckState("LD001", State.MADE)
    missing = ended([], needs=(lambda _: not_reached("There is no validation."),))
    assert missing == ([], CheckState("LD001", State.NOT_REACHED, "There is no validation."))


def test_what_a_check_needs_hides_no_finding() -> None:
    findings, state = ended([fault("Wrong.")], needs=(lambda _: not_reached("There is no validation."),))
    assert ([finding.verdict for finding in findings], state.state) == ([Verdict.FAULT], State.MADE)


def test_after_a_rank_has_failed_nothing_is_called_not_reached() -> None:
    for found in ([], [not_reached("No scaler is used.")]):
        _, state = ended(found, ranks=False)
        assert state.state is State.CANNOT_TELL
        assert "ValueError: no data" in state.reason
    assert ended([fault("Wrong.")], ranks=False)[1].state is State.MADE


def test_a_note_does_not_make_a_check_that_cannot_tell() -> None:
    findings, state = ended([note("Worth knowing."), cannot_tell("It is random.")])
    assert ([finding.verdict for finding in findings], state.state) == ([Verdict.NOTE], State.CANNOT_TELL)


def test_a_defect_of_a_check_is_no_result() -> None:
    _, state = ended(KeyError("x"))
    assert (state.state, "KeyError" in state.reason) == (State.CANNOT_TELL, True)


def test_every_check_says_what_it_needs_or_gives_its_own_reasons() -> None:
    """A program that only imports torch has no made check, except for files and groups."""
    end = event("end", reached_end=True, failures=[], libraries=[])
    nothing = evidence(ranks=records([end], [end]))
    examination = _Examination(nothing, load_checks(), Path())
    examination._check()
    made = [code for code, state in examination.states.items() if state.state is State.MADE]
    assert made == ["LD032"]
    assert all(state.reason for code, state in examination.states.items() if code not in made)


def test_the_report_says_why_one_process_was_not_compared() -> None:
    own = Evidence(evidence().spec, Recorded(), {}, RankComparison(cannot="it hung"))
    assert (comparison_of(own).made, comparison_of(own).reason) == (False, "it hung")
    own.reference = RankComparison(difference=0.5, differences=(0.5,), module="net.norm")
    found = comparison_of(own)
    assert (found.made, found.differences, found.module) == (True, (0.5,), "net.norm")


def test_a_signal_within_a_check_ends_the_examination() -> None:
    with pytest.raises(StoppedError):
        ended(StoppedError(signal.SIGTERM))
