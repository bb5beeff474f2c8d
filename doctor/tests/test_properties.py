"""The properties that checks measure on any program: decisions of the ranks, own generators, saved state."""

from __future__ import annotations

import argparse
import builtins
import csv
import io
import itertools
import json
import logging
import random
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ddp_doctor.evidence.decisions import different_decisions, own_value
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.gradients import skipping_rank
from ddp_doctor.evidence.rank_comparison import passes_of_rank_0
from ddp_doctor.faults.ld013_mean_over_unequal_counts import _excess, _means
from ddp_doctor.faults.ld024_metric_averaged_incorrectly import _numbers, _only_logged, wrong_metrics
from ddp_doctor.faults.ld025_resume_loses_state import (
    _loads_state,
    _loads_without_schedule,
    _not_restored,
    _resumed_from,
    _taken_from_rank_0,
)
from ddp_doctor.launch.runner import Runner
from ddp_doctor.probes.branches import operands_of_file, values_of
from ddp_doctor.probes.generators import OwnGenerators, drawn
from ddp_doctor.probes.options import OPTIONS, OptionProbe
from ddp_doctor.probes.reports import ReportProbe
from ddp_doctor.probes.state import StateProbe
from ddp_doctor.records.recorder import Recorder
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

LOOP = """\
def main():
    for epoch in range(9):
        step()
        if rank == 0:
            print()
        if loss > best:
            bad += 1
        if bad > 3:
            break
"""


def _evidence(path: Path, outcomes: list[dict[int, list[int]]]) -> Evidence:
    """Returns the evidence of ranks that ran these lines after each line."""
    ranks = []
    for number, lines in enumerate(outcomes):
        branches = {f"{path}:{line}": found for line, found in lines.items()}
        step = {"kind": "step", "step": 0, "stack": [f"{path}:3"]}
        ended = {"kind": "end", "step": 0, "reached_end": True}
        steps = dict.fromkeys(branches, 1)
        ranks.append(
            RankRecord(number, [{"kind": "branches", "step": 0, "lines": branches, "steps": steps}, step, ended])
        )
    spec = Spec(Target("a:b"), world_size=2)
    run = Run(spec, path.parent, ranks)
    return Evidence(spec, Runner.__new__(Runner), {"ranks": run, "many steps": run})


def test_a_decision_by_own_data_is_found_through_the_value_that_it_sets(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    asked = {4: [5, 5, 5], 6: [8, 7, 8], 8: [2, 2, 2]}, {4: [6, 6, 6], 6: [8, 8, 8], 8: [2, 2, 2]}
    (decision,) = different_decisions(_evidence(path, list(asked)))
    assert (decision.text, decision.time, decision.stops) == ("loss > best", 2, True)


def test_equal_decisions_and_those_by_the_rank_are_none(tmp_path: Path) -> None:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    lines = {4: [5, 5], 6: [8, 7], 8: [2, 2]}
    assert not different_decisions(_evidence(path, [lines, {**lines, 4: [6, 6]}]))


@pytest.mark.parametrize(
    ("condition", "values", "found"),
    [
        ("stopper.update(loss)", (1.5, 1.25), True),
        ("loss > best", (1.5, 1.25), True),
        ("loss > best", (1.5, 1.5 + 1e-9), False),
        ("count > most", (3.0, 4.0), False),
        ("rank == 0 and loss > best", (1.5, 1.25), False),
    ],
)
def test_a_number_of_its_own_by_which_a_rank_will_stop_is_found(
    condition: str, values: tuple[float, float], found: bool, tmp_path: Path
) -> None:
    path = tmp_path / "loop.py"
    path.write_text(
        f"def main():\n    for epoch in range(9):\n        step()\n        if {condition}:\n            break\n"
    )
    evidence = _evidence(path, [{4: [2, 2]}, {4: [2, 2]}])
    for rank, value in zip(evidence.ranks, values, strict=True):
        rank.events[0]["values"] = {f"{path}:4": [{"loss": 2.0}, {"loss": value}]}
    value = own_value(evidence)
    assert bool(value) is found
    assert not value or (value.text, value.operand, value.values) == (condition, "loss", values)


@pytest.mark.parametrize("begin", ["def main():", "if __name__ == '__main__':"])
@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["if guard.rejects(loss):", "    continue", "step()"], True),
        (["if loss < most:", "    step()"], True),
        (["if loss < most:", "    pass", "else:", "    step()"], True),
        # The optimizer steps in any case.
        (["if loss < most:", "    step()", "else:", "    step()"], False),
        (["if loss > most:", "    report()", "step()"], False),
        (["step()", "if loss > most:", "    continue"], False),
        (["if loss > most:", "    for _ in (1, 2):", "        continue", "step()"], False),
    ],
)
def test_a_number_of_its_own_by_which_a_rank_will_skip_a_step_is_found(
    lines: list[str], found: bool, begin: str, tmp_path: Path
) -> None:
    path = tmp_path / "loop.py"
    path.write_text(f"{begin}\n    for batch in loader:\n" + "".join(f"        {line}\n" for line in lines))
    place = 3 + next(number for number, line in enumerate(lines) if line.startswith("if"))
    evidence = _evidence(path, [{place: [2, 2]}, {place: [2, 2]}])
    stack = [f"{path}:{3 + number}" for number, line in enumerate(lines) if "step()" in line]
    for rank, value in zip(evidence.ranks, (1.5, 1.25), strict=True):
        rank.events[0]["values"] = {f"{path}:{place}": [{"loss": 2.0}, {"loss": value}]}
        rank.events[1]["stack"] = stack
    assert bool(own_value(evidence, skips=True)) is found
    assert own_value(evidence) is None


def test_the_numbers_that_a_condition_reads(tmp_path: Path) -> None:
    path = tmp_path / "conditions.py"
    path.write_text(
        "if stopper.update(metrics['loss']) or x:\n    pass\n"
        "while not update(values['loss'], own.best, loss):\n    pass\n"
        "if not math.isfinite(loss):\n    raise ValueError\n"
    )
    operands = operands_of_file(str(path))
    assert list(operands) == [3]
    own = SimpleNamespace(best=0.5)
    values, loss = {"loss": 2.5, "name": "x"}, torch.tensor(1.5, requires_grad=True)
    assert values_of(operands[3], sys._getframe()) == {"values['loss']": 2.5, "own.best": 0.5, "loss": 1.5}
    assert own
    assert loss.requires_grad
    assert values


def test_the_draws_of_own_generators_are_counted() -> None:
    mine = [np.random.default_rng(0), random.Random(0), np.random.RandomState(3)]
    own = OwnGenerators()
    own.find()
    assert all(any(known is generator for known in own.known) for generator in mine)
    states = own.states()
    mine[0].random(40)
    for _ in range(30):
        mine[1].random()
    assert sorted(drawn(states, own.states()).values()) == [40, 60]


def test_an_average_of_the_weights_is_told_from_the_weights(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    average = {name: value.clone() for name, value in net.state_dict().items()}
    probe = StateProbe(Recorder(tmp_path), Spec(Target("a:b")))
    probe.optimizers = [optimizer]
    found = probe.saved({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 1})
    assert found["optimizers"] == 1
    assert "epoch" in found["keys"]
    assert "step" not in found["keys"]
    assert set(found["weights"]) <= set(found["tensors"])
    assert str(id(average)) in {copy["id"] for copy in found["copies"]}
    assert str(id(net)) not in {copy["id"] for copy in found["copies"]}


def _restarted(**changes: Any) -> tuple[list[RankRecord], list[RankRecord]]:
    """Returns the records of a program that resumes with an average and a schedule, with changes of what it has."""
    saved = {
        "kind": "saved",
        "step": 3,
        "place": "train.py:9",
        "optimizers": 1,
        "tensors": ["w", "average"],
        "weights": ["w"],
        "states": ["moments"],
        "copies": [{"id": "1", "name": "dict", "digests": ["average"]}],
    }
    surveys = [{"kind": "copies", "step": step, "digests": {"1": f"average {step}"}} for step in range(4)]
    steps = [
        {"kind": "step", "step": step, "optimizer": 0, "name": "Adam", "sharded": False, "lr": [0.1 * 0.5**step]}
        for step in range(5)
    ]
    first = [*surveys, *steps, saved, {"kind": "end", "step": 5, "reached_end": True}]
    begun = {"weights": ["w"], "states": ["moments"], "copies": {"7": ["average"], "8": ["average"]}}
    ranks = []
    for number in range(2):
        own = {**begun, **changes} if number or "states" not in changes else begun
        later = {**begun, "copies": {"7": ["later"], "8": ["average"]}}
        events = [{"kind": "continued", "step": step, **values} for step, values in enumerate((own, later))]
        rate = changes.get("lr", steps[3]["lr"])
        ended = {"kind": "end", "step": 2, "reached_end": True}
        ranks.append(RankRecord(number, [*events, {**steps[0], "lr": rate}, ended]))
    return [RankRecord(number, first) for number in range(2)], ranks


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"states": [""]}, "rank 1 does not restore it"),
        ({"copies": {"7": ["begun again"], "8": ["average"]}}, "begins with other values"),
        ({"lr": [0.1]}, "the learning rate 0.1 instead of 0.0125"),
        ({"weights": ["initial"]}, "does not resume"),
    ],
)
def test_what_a_program_does_not_restore_is_named(changes: dict[str, Any], said: str) -> None:
    lost = _not_restored(*_restarted(**changes))
    assert bool(lost) is bool(said)
    assert said in (lost.message if lost else "")


@pytest.mark.parametrize(
    ("begun", "step"),
    [
        (["frozen", "w1", "key1"], 3),
        (["frozen", "w2", "key moved on"], 6),
        (["frozen", "w0", "key0"], None),
        (["frozen", "w1"], None),
    ],
)
def test_a_checkpoint_is_known_by_half_of_the_weights_that_change(begun: list[str], step: int | None) -> None:
    saved = [{"step": 3 * number, "weights": ["frozen", f"w{number}", f"key{number}"]} for number in (1, 2)]
    found = _resumed_from(saved, begun)
    assert (found["step"] if found else None) == step


@pytest.mark.parametrize(("again", "said"), [(0, "trains epoch 0 again"), (1, "")])
def test_an_epoch_that_was_finished_is_not_trained_again(again: int, said: str) -> None:
    firsts, ranks = _restarted()
    for record in firsts:
        record.events += [{"kind": "set_epoch", "number": number, "step": 3 * number} for number in range(2)]
    for record in ranks:
        record.events.append({"kind": "set_epoch", "number": again, "step": 0})
    lost = _not_restored(firsts, ranks)
    assert said in lost.message if lost else not said


@pytest.mark.parametrize(
    ("names", "values", "found"),
    [
        (["-r", "--resume"], {}, ["--resume", "file"]),
        (["--resume"], {"action": "store_true"}, ["--resume", "nothing"]),
        (["--resume_from_checkpoint"], {"type": str, "default": ""}, ["--resume_from_checkpoint", "file"]),
        (["--restore-dir"], {"type": Path}, ["--restore-dir", "folder"]),
        (["--continue"], {"action": "store_true"}, ["--continue", "nothing"]),
        (["--resume"], {"default": "last.pt"}, None),
        (["--resume"], {"type": int}, None),
        (["--resume"], {"choices": ["never", "allow"]}, None),
        (["--no-resume"], {"action": "store_true"}, None),
        (["--resume-lr"], {}, None),
        (["--given", "--resume"], {}, None),
    ],
)
def test_an_option_that_resumes_is_known(
    names: list[str], values: dict[str, Any], found: list[str] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.Action, "__init__", argparse.Action.__init__)
    monkeypatch.setattr(sys, "argv", ["train.py", "--given=yes"])
    OptionProbe(tmp_path, Spec(Target("a:b"))).install()
    argparse.ArgumentParser().add_argument(*names, **values)
    assert (json.loads((tmp_path / OPTIONS).read_text()) if (tmp_path / OPTIONS).exists() else None) == found


def test_an_option_that_resumes_gets_the_checkpoint_under_its_last_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(argparse.Action, "__init__", argparse.Action.__init__)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    (tmp_path / "last.pt").touch()
    given = {"resume_by": ["--resume", str(tmp_path / "last.pt.tmp")]}
    OptionProbe(tmp_path, Spec(Target("a:b"), interventions=given)).install()
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume")
    assert parser.parse_args().resume == str(tmp_path / "last.pt")


def _labelled(rank: int, count: int, factor: float, weights: tuple[float, float]) -> RankRecord:
    """Returns a rank whose loss is a multiple of a mean over labels, and whose gradient is a mean of the ranks'."""
    events = [
        {"kind": "mean_of_labels", "step": 0, "value": 2.0, "count": count, "place": "train.py:4"},
        {"kind": "backward", "step": 0, "loss": 2.0 * factor},
    ]
    own = torch.eye(2)
    applied = weights[0] * own[0] + weights[1] * own[1]
    return RankRecord(rank, events, {"applied/0/w": applied, "local/0/w": own[rank]})


@pytest.mark.parametrize(
    ("factors", "weights", "known"),
    [
        ((1.0, 1.0), (0.5, 0.5), True),
        ((0.5, 0.5), (1.0, 1.0), True),
        ((0.5, 1.5), (0.5, 0.5), False),
        ((1.0, 1.0), (0.25, 0.75), False),
    ],
)
def test_labels_are_compared_if_nothing_weights_their_means(
    factors: tuple[float, float], weights: tuple[float, float], known: bool
) -> None:
    ranks = [_labelled(rank, 10 + 20 * rank, factors[rank], weights) for rank in range(2)]
    found = _means(ranks)
    assert bool(found) is known
    if found:
        assert [own[0]["count"] for own in found[0]] == [10, 30]
        assert _excess(found[0]) == 0.5


class _Stopper:
    def common(self, value: float) -> bool:
        return _total(value) > 1

    @staticmethod
    def own(value: float) -> bool:
        return value > 1


def _total(value: float) -> float:
    sums = torch.tensor(value)
    torch.distributed.all_reduce(sums)
    return sums.item()


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("stopper.common(loss)", {}),
        ("_total(loss) > 1", {}),
        ("stopper.own(loss)", {"loss": 0.5}),
        ("loss > 1", {"loss": 0.5}),
    ],
)
def test_a_number_that_a_function_combines_is_no_decision_of_a_rank(
    condition: str, expected: dict[str, float], tmp_path: Path
) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"if {condition}:\n    pass\n")
    frame = SimpleNamespace(f_locals={"stopper": _Stopper(), "loss": 0.5}, f_globals=globals())
    assert values_of(operands_of_file(str(path))[1], frame) == expected


def test_a_number_within_the_loop_of_an_evaluation_is_its_progress() -> None:
    """The number after the loop is a metric, and so is that of a loop which the program has left early."""

    def event(kind: str, **values: Any) -> dict[str, Any]:
        return {"kind": kind, "loader": 1, "iteration": 0, "step": 3, "trains": False, **values}

    def reported(key: str) -> dict[str, Any]:
        return event("reported", key=key, values=[(0.5, 1e-3, "loss")], name="", place=key)

    loop = [event("batch"), reported("every batch"), event("batch"), reported("every batch")]
    again = event("batch", iteration=1)
    for events in ([*loop, event("stop")], loop):
        record = RankRecord(0, [*events, reported("after"), again, reported("left early"), event("end")])
        assert {place for place, *_ in _numbers(record)} == {"after", "left early"}
    one = RankRecord(0, [event("batch"), reported("only batch"), event("stop"), reported("after")])
    assert {place for place, *_ in _numbers(one)} == {"after"}
    kept = RankRecord(0, [event("batch"), reported("validation"), event("batch", step=9), reported("validation")])
    assert {place for place, *_ in _numbers(kept)} == {"validation"}


@pytest.mark.parametrize(("reduced", "own"), [(False, True), (True, False)])
def test_an_accuracy_that_one_change_of_the_samples_leaves_is_a_metric(
    reduced: bool, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = itertools.count()

    def reported(accuracy: float) -> dict[str, Any]:
        values = [(accuracy, 1e-3, "accuracy"), (float(next(times)), 1e-3, "seconds")]
        return {"kind": "reported", "values": values, "key": "a.py:9", "name": "", "place": "a.py:9 in main", "step": 1}

    def run(self: Evidence, name: str, environment: object = None, **changes: Any) -> Run:
        if name in self.runs:
            return self.runs[name]
        # Small samples are all in one class, so that the accuracy stays as it is.
        first, *_ = changes["interventions"].get("perturb", (None,))
        large = changes["interventions"].get("factor", 0.5) < 0 and (first == 0 or reduced)
        value = 0.32 if "world_size" in changes else 0.5 if large else 0.385
        indices = [0, 1] if "world_size" in changes else [0]
        batch = {"kind": "batch", "loader": 1, "iteration": 1, "step": 1, "trains": False, "indices": indices}
        forward = {"kind": "forward", "weights": "w"}
        return Run(self.spec, Path(), [RankRecord(0, [batch, forward, reported(value), {"kind": "end"}])])

    monkeypatch.setattr(Evidence, "run", run)
    spec, runs = Spec(Target("a:b"), world_size=2), dict[str, Run]()
    for name in ("ranks", "again"):
        ranks = []
        for rank in range(2):
            batch = {"kind": "batch", "loader": 1, "iteration": 1, "step": 1, "trains": False, "indices": [rank]}
            epoch = {"kind": "epoch", "trains": False, "loader": 1}
            ranks.append(RankRecord(rank, [epoch, batch, reported(0.4), {"kind": "end"}]))
        runs[name] = Run(spec, Path(), ranks)
    evidence = Evidence(spec, Runner.__new__(Runner), runs)
    ((metric,), reason) = wrong_metrics(evidence)
    assert (metric.value, metric.expected, metric.own, reason) == (0.385, 0.32, own, "")


@pytest.mark.parametrize(
    ("by_trainer", "monitored", "expected"),
    [(True, "train_loss", True), (True, "val_loss", False), (False, "train_loss", False)],
)
def test_what_a_trainer_only_logs_is_no_fault(by_trainer: bool, monitored: str, expected: bool) -> None:
    events = [
        {"kind": "reported", "name": "val_loss_epoch", "by_trainer": by_trainer},
        {"kind": "monitor", "name": monitored, "callback": "EarlyStopping"},
        {"kind": "end"},
    ]
    spec = Spec(Target("a:b"), world_size=1)
    evidence = Evidence(spec, Runner.__new__(Runner), {"ranks": Run(spec, Path(), [RankRecord(0, events)])})
    assert _only_logged(evidence, "val_loss_epoch") is expected


def test_numbers_that_a_library_prints_or_writes_for_the_program_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[tuple[Any, str]] = [(builtins, "print"), (logging.Logger, "_log"), (json, "dump"), (json, "dumps")]
    for owner, name in [*places, (csv.DictWriter, "writerow"), (Path, "write_text")]:
        monkeypatch.setattr(owner, name, getattr(owner, name))
    library: dict[str, Any] = {}
    source = "def told(value, depth):\n    told(value, depth - 1) if depth else print('mae', value)\n"
    exec(compile(source, f"{sysconfig.get_paths()['purelib']}/library.py", "exec"), library)  # noqa: S102
    recorder = Recorder(tmp_path)
    ReportProbe(recorder).install()
    library["told"](0.25, 2)
    # A progress bar, or the summary of a trainer.
    library["told"](0.5, 20)
    json.dumps({"epoch": 1, "r2": 0.75})
    csv.DictWriter(io.StringIO(), ["auc"]).writerow({"auc": 0.875})
    (tmp_path / "metrics.txt").write_text("wer 0.125")
    found = [(word, value) for event in recorder.events for value, _, word in event["values"]]
    assert found == [("mae", 0.25), ("r2", 0.75), ("auc", 0.875), ("wer", 0.125)]


RESUME = "optimizer.load_state_dict(state['opt'])\nnet.load_state_dict(state['net'])\n"


@pytest.mark.parametrize(
    ("source", "restarts"),
    [
        (RESUME, True),
        ("net.load_state_dict(state['net'])\n", False),
        (RESUME + "scheduler.load_state_dict(state['lr'])\n", False),
        (RESUME + "warmup.load_state_dict(state['lr'])\n", False),
        (RESUME + "for name, part in parts.items():\n    part.load_state_dict(state[name])\n", False),
        (RESUME + "schedule = StepLR(optimizer, 3, last_epoch=epoch)\n", False),
        (RESUME + "schedule.last_epoch = epoch\n", False),
        (RESUME + "for _ in range(epoch):\n    schedule.step()\n", False),
        (RESUME + "scheduler.step(epoch)\n", False),
        (RESUME + "for x in loader:\n    loss(x).backward()\n    schedule.step()\n", True),
        ("def (:\n", False),
    ],
)
def test_code_that_restarts_a_schedule_is_told_from_code_that_restores_it(
    source: str, restarts: bool, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert _loads_without_schedule([str(path), str(tmp_path / "missing.py")]) is restarts


@pytest.mark.parametrize(
    ("source", "loads"),
    [
        ("torch.save({'model': model.state_dict()}, 'last.pt')", False),
        ("loader = DataLoader(data)\nrows = json.load(file)", False),
        ("model.load_state_dict(torch.load('last.pt'))", True),
        ("accelerator.load_state('folder')", True),
    ],
)
def test_code_that_restores_nothing_is_known(tmp_path: Path, source: str, loads: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(source)
    assert _loads_state([str(path)]) is loads
    # What cannot be read may restore something.
    assert _loads_state([str(tmp_path / "missing.py")])


def _call(inputs: str, generator: str, length: str) -> dict[str, Any]:
    return {"kind": "forward", "step": 0, "inputs": [inputs, length], "generators": {"torch": generator}}


@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        ((_call("x0", "g0", "0"), _call("x1", "g1", "1")), None),
        ((_call("x0", "g0", "0"), _call("x0", "g1", "1")), True),
        # The order is another one, in which the texts of both ranks have the length of rank 0's text before.
        ((_call("y0", "h0", "0"), _call("y1", "h1", "0")), None),
        # Other noise on its samples.
        ((_call("x0", "g0", "0"), _call("y1", "g0", "1")), True),
        # Other dropout alone.
        ((_call("x0", "g0", "0"), _call("x1", "g0", "1")), False),
        # The state of a recurrent network begins with zeros on all ranks, which is that of no rank before.
        ((_call("zeros", "g0", "0"), _call("zeros", "g1", "1")), None),
    ],
)
def test_what_all_ranks_take_from_rank_0_when_they_resume(resumed: Any, expected: bool | None) -> None:
    firsts = [RankRecord(rank, [_call(f"x{rank}", f"g{rank}", f"{rank}"), {"kind": "end"}]) for rank in range(2)]
    again = [RankRecord(rank, [call, {"kind": "end"}]) for rank, call in enumerate(resumed)]
    message, is_fault = _taken_from_rank_0(firsts, again, 0)
    assert (is_fault if message else None) is expected


@pytest.mark.parametrize(
    ("passes", "weights", "expected"),
    [
        ([1, 1, 1], ["a", "b", "c"], None),
        ([1, 1, 2], ["a", "b", "d"], 1),
        # Unequal numbers of micro-batches, after which the weights are equal.
        ([1, 1, 2], ["a", "b", "c"], None),
        # The weights differ for another reason.
        ([1, 1, 1], ["a", "b", "d"], None),
    ],
)
def test_a_rank_that_skips_a_step_has_more_passes(passes: list[int], weights: list[str], expected: int | None) -> None:
    ranks = []
    for rank, (counts, after) in enumerate((([1, 1, 1], ["a", "b", "c"]), (passes, weights))):
        steps = [
            {"kind": "step", "step": step, "passes": [0] * count, "names": {}, "place": ""}
            for step, count in enumerate(counts)
        ]
        stepped = [{"kind": "stepped", "weights": {"0:0": digest}} for digest in after]
        ranks.append(RankRecord(rank, [*steps, *stepped, {"kind": "end"}]))
    spec = Spec(Target("a:b"), world_size=2)
    evidence = Evidence(spec, Runner.__new__(Runner), {"ranks": Run(spec, Path(), ranks)})
    assert skipping_rank(evidence) == expected


def test_passes_that_are_summed_again_count_more() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [[torch.randn(20, generator=generator) for _ in range(2)] for _ in range(2)]
    applied = 0.7 * (2 * (parts[0][0] + parts[1][0]) + parts[0][1] + parts[1][1])
    ranks = []
    for rank, own in enumerate(parts):
        tensors = {f"micro{number}/0/0:0": part for number, part in enumerate(own)}
        ranks.append(RankRecord(rank, [{"kind": "end"}], {**tensors, "applied/0/0:0": applied}))
    weights = passes_of_rank_0(Run(Spec(Target("a:b"), world_size=2), Path(), ranks), 0)
    assert weights == pytest.approx((1.4, 0.7))
