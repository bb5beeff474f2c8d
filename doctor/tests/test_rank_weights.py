"""Weights that must be equal on all ranks, and what one rank trains alone, on recorded events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import RankComparison
from ddp_doctor.faults import ld033_wrong_collective_result, ld036_unexplained_difference
from ddp_doctor.launch.runner import Runner
from ddp_doctor.probes.alone import AloneProbe
from ddp_doctor.probes.calls import CallProbe
from ddp_doctor.probes.steps import StepProbe
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

SPEC = Spec(Target("mine:main"), world_size=2)
KEY = "0:0"


def rank(number: int, held: str = "", lr: float = 0.1, applied: float = 1.0, after: float = 2.0) -> RankRecord:
    """Returns a rank that takes one step, and calls a network that it does not train if `held` is a digest of it."""
    step: dict[str, Any] = {"step": 0, "place": "train.py:9", "optimizer": 0, "names": {KEY: "weight"}, "lr": [lr]}
    events = [
        {"kind": "step", **step, "sharded": False, "name": "Adam"},
        {"kind": "stepped", "step": 0, "place": "", "optimizer": 0, "weights": {KEY: str(after)}},
        {"kind": "forward", "step": 1, "place": "train.py:7", "module": "Teacher", "held": held},
        {"kind": "end", "step": 1, "reached_end": True},
    ]
    values = {"before": 0.0, "applied": applied, "local": applied, "after": after}
    return RankRecord(number, events, {f"{what}/0/{KEY}": torch.tensor([value]) for what, value in values.items()})


def evidence(*ranks: RankRecord, **values: Any) -> Evidence:
    run = Run(SPEC, Path(), [*ranks])
    return Evidence(SPEC, Runner.__new__(Runner), {"ranks": run, "many steps": run}, **values)


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({}, ""),
        ({"after": 3.0}, "the states of the optimizers differ"),
        ({"after": 3.0, "lr": 0.2}, "the learning rates are 0.1 and 0.2"),
        ({"after": 3.0, "applied": 5.0}, "no other check knows the cause"),
        ({"held": "another"}, "The Teacher is called on all ranks and is not trained"),
    ],
)
def test_weights_that_differ_between_ranks_are_a_fault(second: dict[str, Any], said: str) -> None:
    ranks = rank(0, held="one"), rank(1, **{"held": "one", **second})
    found = ld036_unexplained_difference.check(evidence(*ranks, reference=RankComparison(difference=0.0)))
    assert [finding.verdict.value for finding in found] == ["fault"] * bool(said)
    assert said in "".join(finding.message for finding in found)


@pytest.mark.parametrize(("second", "found"), [(2.0, []), (3.0, ["fault"])])
@pytest.mark.parametrize("explained", [True, False])
def test_weights_that_differ_in_later_steps_only_are_a_fault(second: float, found: list[str], explained: bool) -> None:
    given = evidence(rank(0), rank(1), reference=RankComparison(difference=0.0), explained=explained)
    given.runs["many steps"] = Run(SPEC, Path(), [rank(0), rank(1, after=second)])
    assert [finding.verdict.value for finding in ld036_unexplained_difference.check(given)] == found
    # A fault of another check may have this effect.
    given.faulty = True
    assert not ld036_unexplained_difference.check(given)


def test_a_difference_that_a_check_explains_is_not_reported_again() -> None:
    assert not ld036_unexplained_difference.check(evidence(rank(0), rank(1, after=3.0), explained=True))


def test_another_gradient_than_that_of_one_process_is_unclear() -> None:
    other = RankComparison(difference=0.5, threshold=1e-7)
    (found,) = ld036_unexplained_difference.check(evidence(rank(0), rank(1), reference=other))
    assert found.verdict.value == "unclear"


def _with_work(tmp_path: Path) -> tuple[CallProbe, Recorder, torch.nn.Parameter, list[tuple[Any, Any, Any]]]:
    recorder = Recorder(tmp_path)
    probe = CallProbe(recorder, SPEC, StepProbe(recorder, SPEC))
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return probe, recorder, weight, probe._begun


@pytest.mark.parametrize("waited", [True, False])
def test_a_gradient_whose_reduction_is_not_waited_for_is_a_fault(waited: bool, tmp_path: Path) -> None:
    probe, recorder, weight, begun = _with_work(tmp_path)
    work = dist.Work()
    assert weight.grad is not None
    begun.append((work, recorder.add("collective", op="all_reduce"), {weight.grad.data_ptr()}))
    if waited:
        probe._on_wait(work)
    probe.after_step([weight])
    given = evidence(RankRecord(0, [*recorder.events, {"kind": "end", "step": 1, "reached_end": True}]))
    assert [finding.verdict.value for finding in ld033_wrong_collective_result.check(given)] == ["fault"] * (not waited)


def test_a_result_may_be_waited_for_in_the_next_step(tmp_path: Path) -> None:
    probe, recorder, weight, begun = _with_work(tmp_path)
    begun.append((dist.Work(), recorder.add("collective", op="all_reduce"), {torch.ones(1).data_ptr()}))
    recorder.step = 1
    probe.after_step([weight])
    assert "not_waited" not in {event["kind"] for event in recorder.events}
    recorder.step = 3
    probe.after_step([weight])
    assert "not_waited" in {event["kind"] for event in recorder.events}


@pytest.mark.parametrize(
    ("journal", "alone"),
    [
        ([], False),
        (["collective"], True),
        (["collective", "collective"], True),
        (["collective", "backward", "collective"], False),
        (["ddp_forward"], False),
    ],
)
def test_a_rank_trains_alone_while_another_one_waits_that_has_not_trained(
    journal: list[str], alone: bool, tmp_path: Path
) -> None:
    (tmp_path / "journal1.jsonl").write_text("".join(json.dumps({"kind": kind}) + "\n" for kind in journal))
    recorder = Recorder(tmp_path)
    assert AloneProbe(recorder, SPEC).is_alone() is alone


def test_what_a_rank_has_trained_alone_is_forgotten(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for kind in ("init_process_group", "backward", "step", "save"):
        recorder.add(kind)
    recorder.keep("applied/0/0:0", torch.ones(1))
    recorder.step = recorder.backwards = 1
    probe = AloneProbe(recorder, SPEC)
    probe.steps = 1
    probe.forget()
    assert [event["kind"] for event in recorder.events] == ["init_process_group", "save", "alone"]
    assert (recorder.step, recorder.backwards, recorder.tensors) == (0, 0, {})
    assert evidence(RankRecord(0, recorder.events)).compare().cannot
