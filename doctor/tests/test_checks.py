"""Each fault on recorded events: what is reported of a faulty program, and what of its mended form and of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded import (
    END,
    KEYS,
    MEAN,
    OWN,
    WRAPPED,
    Event,
    Runs,
    batch,
    both,
    collective,
    epoch,
    event,
    evidence,
    failed,
    forward,
    found,
    journals,
    records,
    step,
    trained,
    wrapped_pass,
)

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import MICRO_BATCHES, RankComparison
from ddp_doctor.faults import load_checks
from ddp_doctor.records.run import RankRecord
from ddp_doctor.records.spec import Spec

# What a row expects of a check that is made and finds nothing.
NOTHING = ""
DEPENDS = "depends on the number of devices"
# By code: what the program does, the verdict, and the evidence or a function of a folder that returns it.
Row = tuple[str, str, Evidence | Callable[[Path], Evidence]]
ROWS: dict[str, list[Row]] = {}
EQUAL = RankComparison(difference=1e-15, differences=(1e-15,))
STEPS = both(collective(), step())


def two(*events: Event) -> Evidence:
    """Returns the evidence of two ranks with these events, which communicate and take a step."""
    return evidence(ranks=both(collective(), *events, step(), END))


def stepped(*applied: Any, **more: Any) -> Evidence:
    """Returns the evidence of two ranks that take a step with these gradients."""
    return evidence(ranks=trained(*applied, **more))


def each(first: Sequence[Event], second: Sequence[Event], *common: Event, **more: Any) -> Evidence:
    """Returns the same for ranks with other events each, after those that are common."""
    return evidence(ranks=records(*([collective(), *common, *own, step(), END] for own in (first, second))), **more)


def calls(first: int = 0, labels: str = "1", **values: Any) -> Event:
    """Returns direct calls of a data set whose samples have numbers from `first` on."""
    samples = {index: [f"image {first + index}", labels[index % len(labels)]] for index in range(20)}
    known = {"base": 0, "dataset": "Digits", "random": 0.0, "generators": [], "samples": samples}
    return event("calls", **(known | values))


# Samples and their order.


def epochs(*pair: Event, runs: dict[str, Any] | None = None, told: bool = False) -> Evidence:
    numbers = [event("set_epoch", number=0)] if told else []
    named = {name: both(*found) for name, found in (runs or {}).items()}
    return evidence(ranks=both(collective(), step(), *numbers, *pair), runs=named)


def stream(*samples: str, workers: int = 0) -> list[Event]:
    batches = [batch(number, samples=[*part]) for number, part in enumerate(samples)]
    return [*batches, epoch(iterable=True, indices=[], workers=workers)]


def sampled(first: Sequence[int], second: Sequence[int], sampler: str = "Balanced", **values: Any) -> Evidence:
    one = records([epoch(sampler=sampler, indices=[*range(16)], sizes=[4] * 4, samples=16)])
    ranks = ([epoch(**{"indices": [*indices], "samples": 16} | values)] for indices in (first, second))
    return each(*ranks, single=one)


def permuted(*rows: str) -> Evidence:
    return each(*([forward(rows=[*own[n : n + 2]]) for n in range(0, len(own), 2)] for own in rows))


def split(first: Event, second: Event, faulty: bool = False) -> Evidence:
    ranks = (
        [epoch(**own), epoch(trains=False, loader=1, **other)] for own, other in ((first, second), (second, first))
    )
    return replace(each(*ranks, calls()), faulty=faulty)


def workers(*states: str) -> Evidence:
    begun = ([{"NumPy": state, "torch": "", "Python": ""}] for state in states)
    return two(calls(**RANDOM), *(epoch(iteration=n, epoch=n, worker_generators=one) for n, one in enumerate(begun)))


ORDER = [3, 1, 0, 2]
AGAIN = epoch(indices=ORDER), epoch(indices=ORDER, iteration=1, epoch=1)
CHANGED = epoch(indices=ORDER), epoch(indices=ORDER[::-1], iteration=1, epoch=1)
SORTED = epoch(), epoch(iteration=1, epoch=1)
ROWS["LD001"] = [
    ("nothing calls set_epoch", "fault", epochs(*AGAIN, runs={"set_epoch": CHANGED})),
    ("the order changes", NOTHING, epochs(*CHANGED)),
    ("shortened epochs", NOTHING, epochs(*AGAIN, told=True, runs={"set_epoch": CHANGED, "whole epochs": CHANGED})),
    ("no loader", "cannot tell", epochs()),
]
ROWS["LD002"] = [
    ("no sampler", "fault", two(calls(), epoch(indices=ORDER))),
    ("a sampler", NOTHING, each([epoch(indices=[0, 2])], [epoch(indices=[1, 3])], calls())),
    ("another permutation on each rank", "fault", permuted("abcdefgh", "efghijkl")),
    ("the same samples without a loader", "fault", permuted("abcdefgh", "abcdefgh")),
    ("one permutation", "cannot tell", permuted("abcdefgh", "ijklmnop")),
    ("drawn with replacement", "cannot tell", permuted("abacdefg", "efghijkl")),
    ("some samples fill a batch", NOTHING, each([epoch(indices=[0, 2, 4])], [epoch(indices=[1, 3, 0])], calls())),
    ("contents are not known", "unclear", two(epoch(indices=ORDER))),
    ("data of each rank", "not applicable", each([calls(), epoch()], [calls(100), epoch()])),
    ("independent runs", "not applicable", evidence(ranks=both(step(), epoch()))),
]
ROWS["LD003"] = [
    ("each rank reads all", "fault", two(*stream("ab", "cd"))),
    ("each rank reads its part", NOTHING, each(stream("ab", "cd"), stream("ef", "gh"))),
    ("no stream", "not reached", two(epoch())),
]
EVEN, ODD = range(0, 16, 2), range(1, 16, 2)
ROWS["LD004"] = [
    ("a sampler is replaced and split", "fault", sampled(range(4), range(4))),
    ("a sampler is split", NOTHING, sampled(EVEN, ODD)),
    ("a sampler of torch is split", "not reached", sampled(range(4), range(4), "RandomSampler")),
]
LOW, HIGH = [0, 1, 2, 3], [4, 5, 6, 7]
ROWS["LD005"] = [
    ("each rank splits in its own way", "fault", split({"indices": LOW}, {"indices": HIGH})),
    ("all ranks split alike", NOTHING, each(*[[epoch(), epoch(trains=False, loader=1, indices=HIGH)]] * 2, calls())),
    ("the training data are evaluated", NOTHING, split({"indices": LOW}, {"indices": LOW})),
]
ROWS["LD006"] = [
    ("labels by the order of a set", "fault", each([calls(labels="12")], [calls(labels="21")], epoch())),
    ("labels of a sorted list", NOTHING, two(calls(labels="12"), epoch())),
    ("the data set cannot be called", "cannot tell", two(epoch())),
]
RANDOM: Event = {"random": 1.0, "generators": ["NumPy"]}
ROWS["LD007"] = [
    ("workers begin alike in each epoch", "fault", workers("a", "a")),
    ("workers begin with a seed per epoch", NOTHING, workers("a", "b")),
    ("the data are not random", "not reached", two(calls(), epoch())),
]


# Random numbers.


def draws(into: str, own: bool = False) -> Evidence:
    """Returns ranks whose noise goes into the data or the model, from the generators of one rank unless `own`."""
    flows = [{"op": "randn_like", "place": "mine.py:9 in main"}] if into == "data" else []
    ranks = []
    for rank in (0, 1):
        events = [event("seed", seed=0, generator="NumPy")]
        for number in range(4):
            states = dict.fromkeys(("torch", "NumPy", "Python"), f"{rank * own} {number}")
            drawn = {"generators": states, "at_step": states, "drawn": 8, "hidden": {}, "flows": flows}
            events.append(batch(number, indices=[2 * number + rank], size=1, **drawn))
        ranks.append([*events, epoch(indices=[rank])])
    return each(*ranks)


ROWS["LD008"] = [
    ("equal noise", "fault", draws("data")),
    ("noise of each rank", NOTHING, draws("data", own=True)),
    ("equal masks", "note", draws("model")),
    ("masks of each rank", NOTHING, draws("model", own=True)),
]


# Gradients and weights of the ranks.


def averaged(averages: bool) -> list[RankRecord]:
    """Returns ranks whose weights differ after a step, and are equal before the next one if they are averaged."""
    after = torch.ones(4), 3 * torch.ones(4)
    before = [2 * torch.ones(4)] * 2 if averages else after
    tensors = [{"after/0/0:0": a, "before/1/0:0": b} for a, b in zip(after, before, strict=True)]
    names = {"0:0": "weight"}
    return trained(*OWN, steps=({"names": names},) * 2, later=([step(1, names=names)],) * 2, tensors=tensors)


def clip(norm: float = 70.0) -> Event:
    return event("clip", function="clip_grad_norm_", limit=1.0, norm=norm)


def lost(size: float, zero: bool = True) -> Evidence:
    """Returns ranks with a large gradient and one of a size, which is averaged to zero."""
    own = [{"0:0": MEAN, "0:1": torch.full((4,), (1 + rank) * size)} for rank in (0, 1)]
    applied = {"0:0": MEAN, "0:1": torch.zeros(4) if zero else torch.full((4,), 1.5 * size)}
    alone = records([step()], tensors=[{"applied/0/0:1": own[0]["0:1"]}])
    return evidence(ranks=trained(applied, applied, WRAPPED, wrapped_pass(), own=own), single=alone)


def unexplained(ranks: list[RankRecord], reference: RankComparison = EQUAL, **values: Any) -> Evidence:
    return replace(evidence(reference, ranks=ranks, runs={"numbers later": ranks}), **values)


HALF = {"0:0": OWN[0], "0:1": MEAN}, {"0:0": OWN[1], "0:1": MEAN}
UNEQUAL = ({"lr": [0.1]}, {"lr": [0.3]})
ROWS["LD009"] = [
    ("nothing averages", "fault", stepped(*OWN)),
    ("gradients are averaged", NOTHING, stepped(MEAN, MEAN)),
    ("weights are averaged", "not applicable", evidence(ranks=averaged(True))),
    ("weights are not averaged", "fault", evidence(ranks=averaged(False))),
    ("wrapped models with other rates", "fault", stepped(*OWN, WRAPPED, steps=UNEQUAL)),
    ("no step", "not reached", evidence(ranks=both(collective()))),
]
IGNORED = WRAPPED | {"ignored": [*KEYS.values()]}
ROWS["LD010"] = [
    ("a parameter is new after the wrap", "fault", stepped(*HALF, WRAPPED, wrapped_pass())),
    ("all parameters are wrapped", NOTHING, stepped(MEAN, MEAN, WRAPPED, wrapped_pass())),
    ("DDP is told to ignore them", NOTHING, stepped(*OWN, IGNORED, wrapped_pass())),
]
ROWS["LD011"] = [
    ("rank 0 clips", "fault", stepped(0.01 * MEAN, MEAN, each=([clip()], []))),
    ("all ranks clip", NOTHING, stepped(0.01 * MEAN, 0.01 * MEAN, clip())),
    (
        "rank 1 takes more steps",
        "fault",
        stepped(MEAN, MEAN, later=([], [step(1), event("stepped", 1, weights={})])),
    ),
]
ACCUMULATED = wrapped_pass(synchronizes=False), wrapped_pass()
ROWS["LD016"] = [
    ("no_sync on the last pass", "fault", stepped(*OWN, WRAPPED, *ACCUMULATED[::-1])),
    ("no_sync on the first pass", NOTHING, stepped(MEAN, MEAN, WRAPPED, *ACCUMULATED)),
    ("no no_sync", "not reached", stepped(MEAN, MEAN, WRAPPED, wrapped_pass())),
]
ROWS["LD033"] = [
    ("a gradient is lost", "fault", lost(1e-1)),
    ("a gradient is averaged", NOTHING, lost(1e-1, zero=False)),
    # As of the bias of a key in attention, which is zero in exact arithmetic.
    ("rounding is lost", NOTHING, lost(1e-9)),
    ("a collective is not waited for", "fault", two(event("not_waited", op="all_reduce", of="mine.py:7 in main"))),
    ("several passes", "cannot tell", stepped(MEAN, MEAN, WRAPPED, wrapped_pass(), wrapped_pass())),
]
SAME, APART = trained(MEAN, MEAN), trained(MEAN, MEAN, after="ab")
ROWS["LD036"] = [
    ("an optimizer of each rank", "fault", unexplained(APART)),
    ("equal weights", NOTHING, unexplained(SAME)),
    ("another check explains it", NOTHING, unexplained(APART, explained=True)),
    ("another gradient than one process", "unclear", unexplained(SAME, reference=RankComparison(0.5))),
    ("not compared", "cannot tell", unexplained(SAME, reference=RankComparison(cannot="it hung"))),
]


# The ranks and one process.


def compared(difference: float = 0.5, ranks: list[RankRecord] = STEPS, **values: Any) -> Evidence:
    return evidence(RankComparison(difference, differences=(difference,), **values), EQUAL, ranks=ranks)


def scaled(factor: float, residual: float = 0.0, **values: Any) -> Evidence:
    return compared(abs(factor - 1) + residual, weights=(0.5, 0.5), scale=factor, left=residual, **values)


def combined(*events: Event, second: Sequence[Event] | None = None, **values: Any) -> Evidence:
    ranks = records([*events, step()], [*(events if second is None else second), step()])
    return compared(ranks=ranks, weights=(0.5, 0.4), residual=0.1, **values)


NORM = both(collective(), forward(sensitive=["norm"]), step())
ROWS["LD012"] = [
    ("batch norm of each rank", DEPENDS, compared(ranks=NORM, module="norm", module_class="BatchNorm1d")),
    ("synchronized batch norm", NOTHING, compared(1e-15, NORM)),
    ("another module differs", NOTHING, compared(ranks=NORM, module="head", module_class="Linear")),
    ("outputs are not known", "cannot tell", compared(weights=(0.5, 0.4), residual=0.1, modules_seen=False)),
    ("no batch norm", "not reached", compared(1e-15, both(step(), forward()))),
]
ROWS["LD013"] = [
    ("unequal numbers of labels", "fault", compared(weights=(0.6, 0.4))),
    ("equal numbers of labels", NOTHING, compared(1e-15, weights=(0.5, 0.5))),
    ("nearly equal numbers", "note", compared(4e-4, weights=(0.5002, 0.4998))),
    ("no combination of the ranks' gradients", NOTHING, compared(weights=(0.6, 0.4), residual=0.1)),
]
ROWS["LD014"] = [
    ("gradients are summed", "fault", scaled(2)),
    ("gradients are averaged", NOTHING, scaled(1)),
    ("the loss is divided twice", "fault", scaled(0.5)),
    ("micro-batches and a factor of no division", "cannot tell", scaled(1.3, method=MICRO_BATCHES)),
    ("another gradient after the average", NOTHING, scaled(1, 0.2)),
    ("not compared", "cannot tell", evidence(RankComparison(cannot="it hung"), ranks=STEPS)),
]


def moved(quotient: float, given: Evidence, one: float = 1.0) -> Evidence:
    """Returns evidence whose gradient is this multiple of the derivative, and on one process another one."""

    def give(spec: Spec) -> list[RankRecord]:
        by, factor = spec.interventions["move"]["by"], quotient if spec.world_size > 1 else one
        tensors = {"before/1/0:0": by * torch.ones(2), "applied/1/0:0": factor * torch.ones(2)}
        events = event("backward", 1, loss=2 * by), step(1)
        return records(*[events] * spec.world_size, tensors=[tensors] * spec.world_size)

    return replace(given, runner=Runs(give))


def shapes() -> Evidence:
    return evidence(RankComparison(cannot="they have other shapes"), ranks=both(collective(), step(), step(1)))


ROWS["LD015"] = [
    ("gathered without gradient", "fault", moved(0.5, combined(step()))),
    ("gathered with gradient", NOTHING, compared(1e-15, both(collective(op="all_gather"), step()), weights=(0.5, 0.5))),
    ("local negatives", DEPENDS, moved(1.0, combined(step()))),
    ("detached on one process as well", DEPENDS, moved(0.5, combined(step()), one=0.5)),
    ("not compared, and another derivative", "fault", moved(0.5, shapes())),
    ("not compared, and the derivative", "cannot tell", moved(1.0, shapes())),
    ("a module combines the samples", DEPENDS, combined(module="mix", module_class="Mix")),
    ("dropout in another order", "cannot tell", combined(module="drop", module_class="Dropout")),
    ("outputs are not known", "cannot tell", combined(modules_seen=False)),
]


# Schedules, optimizers and modes.


def schedule(ours: Callable[[int], float], alone: Callable[[int], float]) -> Evidence:
    several, one = ([step(n, lr=[rate(n)]) for n in range(steps)] for rate, steps in ((ours, 3), (alone, 14)))
    return evidence(ranks=both(*several, END), single=records([*one, END]))


def cosine(number: float, total: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(number / total, 1)))


def constant(rate: float) -> Callable[[int], float]:
    return lambda _: rate


def scaler(calls: str) -> Evidence:
    events = {
        "scale": event("scale", scale=1024.0),
        "unscale": event("unscale"),
        "clip": clip(),
        "step": event("scaler_step"),
    }
    return two(event("scaler", enabled=True), *(events[name] for name in calls.split()))


def optimizers(*events: Event, **values: Any) -> Evidence:
    return evidence(ranks=both(*events, step(**values), step(1, **values)))


def modes(*training: bool, before: Sequence[Event] = ()) -> list[Event]:
    found = [*before]
    for number, mode in enumerate(training):
        found += [forward(number, modes={"drop": mode}, sensitive=["drop"]), event("backward", number), step(number)]
    return found


def evaluated(*events: Event, trains: bool = False, loader: int = 1, **modes: bool) -> Evidence:
    call = forward(gradients=False, random=[name for name, training in modes.items() if training], modes=modes)
    return two(epoch(), epoch(trains=trains, loader=1), batch(trains=False, loader=loader), call, *events)


def frozen(*digests: str) -> Evidence:
    calls = [
        forward(number, frozen_norms={"norm": digest}, sensitive=["norm"]) for number, digest in enumerate(digests)
    ]
    return two(*calls)


ROWS["LD017"] = [
    ("a schedule that advances once per rank", "fault", schedule(lambda n: cosine(2 * n, 20), lambda n: cosine(n, 40))),
    ("a schedule by samples", NOTHING, schedule(lambda n: cosine(n, 20), lambda n: cosine(n, 40))),
    ("a warm-up to the rate of all ranks", DEPENDS, schedule(lambda n: 1 + n / 3, constant(1))),
    ("a rate times the ranks", "not reached", schedule(constant(0.2), constant(0.1))),
]
ROWS["LD018"] = [
    ("clipped while scaled", "fault", scaler("scale clip step")),
    ("unscaled before", NOTHING, scaler("scale unscale clip step")),
    ("unscaled for the norm that is logged", "fault", scaler("scale clip unscale step")),
    ("two optimizers", NOTHING, scaler("scale unscale clip unscale clip step step")),
    ("no scaler", "not reached", two()),
]
FORGOTTEN: Event = {"unowned": {"body.weight": "same"}}
ROWS["LD019"] = [
    ("parameters belong to no optimizer", "fault", optimizers(**FORGOTTEN)),
    ("all parameters belong to one", NOTHING, optimizers()),
    ("forgotten parameters with loaded weights", "note", optimizers(**FORGOTTEN, loaded=["body.weight"])),
    ("one step", "not reached", two()),
]
ROWS["LD020"] = [
    ("zero_grad is missing", "fault", optimizers(stale=["weight"])),
    ("gradients are cleared", NOTHING, optimizers()),
    ("one step", "not reached", two()),
]
ROWS["LD021"] = [
    ("eval() without train()", "fault", two(*modes(True, False))),
    ("train() in each epoch", NOTHING, two(*modes(True, True))),
    ("evaluation mode from the beginning", "note", two(*modes(False))),
    ("no forward pass", "cannot tell", two()),
]
DROPS = event("dropout")
ROWS["LD022"] = [
    ("F.dropout in evaluation mode", "fault", evaluated(DROPS, drop=False)),
    ("dropout in training only", NOTHING, evaluated(drop=False)),
    ("Monte Carlo dropout", "note", evaluated(DROPS, drop=True, norm=False)),
    ("without gradients in training", NOTHING, evaluated(DROPS, drop=True, loader=0)),
    ("no evaluation", "not reached", evaluated(DROPS, drop=True, trains=True)),
]
ROWS["LD035"] = [
    ("a frozen part in training mode", "fault", frozen("a", "a")),
    ("a part that is trained", NOTHING, frozen("a", "b")),
    ("no batch norm", "not reached", two(forward())),
]


# Evaluation and prediction.


def evaluation(first: list[int], second: list[int], *events: Event, divided: str = "", **more: Any) -> Evidence:
    own = (
        [epoch(trains=False, loader=1, indices=indices, sizes=[3], divided=value), *events]
        for indices, value in ((first, ""), (second, divided))
    )
    return each(*own, **more)


def reported(value: float, key: str = "a.py:9", **values: Any) -> Event:
    return event("reported", 1, **({"values": [(value, 1e-3, "accuracy")], "key": key, "name": ""} | values))


def program(value: float, alone: float, *ranks: Event, own: bool = True, **of_one: Any) -> Evidence:
    """Returns a program that reports `value` on two ranks and `alone` on one process.

    Args:
        value: What rank 0 reports.
        alone: What one process reports.
        ranks: What both ranks report beside it.
        own: Whether the samples of rank 1 do not change it.
        of_one: `weights` and `indices` of one process.
    """

    def evaluation_of(found: list[int], told: float | None, weights: Sequence[str] = ("w",)) -> list[Event]:
        numbers = [reported(told)] if told is not None else []
        one = batch(1, trains=False, loader=1, iteration=1, indices=found)
        return [one, forward(gradients=False, weights=weights), *numbers, END]

    def run(spec: Spec) -> list[RankRecord]:
        if spec.world_size == 1:
            return records(evaluation_of(of_one.get("indices", [0, 1]), alone, of_one.get("weights", ["w"])))
        first, *_ = spec.interventions.get("perturb", (None,))
        seen = 0.9 if first == 0 or (first == 1 and not own) else value
        return records(evaluation_of([0], seen), evaluation_of([1], None))

    known = [collective(), step(), epoch(trains=False, loader=1)]
    several = records(*([*known, *evaluation_of([rank], (0.4, None)[rank]), *ranks] for rank in (0, 1)))
    return evidence(ranks=several, runs={"again": several}, otherwise=run)


def predicted(first: list[int], second: list[int], *events: Event, works: bool = True) -> Evidence:
    one = event("predict", error="" if works else "TypeError: no batch_size", first=[])
    # What is saved before is no prediction.
    begun = [event("save", path="/a/state.pt", rows=[4]), one]
    epochs = (
        epoch(trains=False, predicts=True, indices=own, samples=8, ascending=own == sorted(own))
        for own in (first, second)
    )
    return each([*begun, next(epochs), *events], [one, next(epochs)])


ROWS["LD023"] = [
    ("a sample counts twice", "fault", evaluation([0, 2, 4], [1, 3, 0], collective(value=6))),
    ("each sample counts once", NOTHING, evaluation([0, 2, 4], [1, 3])),
    ("all ranks evaluate all", NOTHING, evaluation([0, 1, 2], [0, 1, 2])),
    ("no number is seen", "unclear", evaluation([0, 2, 4], [1, 3, 0])),
    ("nothing is evaluated", "not reached", two(epoch())),
    ("the indices are not known", "cannot tell", two(epoch(trains=False, drained=False))),
]
BY_TRAINER = reported(0.25, "b.py:1", name="accuracy", by_trainer=True)
MONITORED = event("monitor", name="accuracy", callback="EarlyStopping")
ROWS["LD024"] = [
    ("the metric of rank 0", "fault", program(0.385, 0.32)),
    ("the metric of all samples", NOTHING, program(0.32, 0.32)),
    ("a mean of the ranks' metrics", DEPENDS, program(0.385, 0.32, own=False)),
    ("the metric of rank 0, logged by a Trainer", "note", program(0.385, 0.32, BY_TRAINER)),
    ("the metric of rank 0, by which it stops", "fault", program(0.385, 0.32, BY_TRAINER, MONITORED)),
    ("other weights on one process", "cannot tell", program(0.385, 0.32, weights=["other"])),
    ("fewer samples on one process", "cannot tell", program(0.385, 0.32, indices=[0])),
    ("no validation", "not reached", two(epoch())),
]
PARTS = [0, 2, 4, 6], [1, 3, 5, 7]
ROWS["LD030"] = [
    ("samples in a random order", "fault", predicted([4, 0, 2, 6], [1, 3, 5, 7])),
    ("all samples in order", NOTHING, predicted(*PARTS)),
    ("rank 0 writes all, or a report", NOTHING, predicted(*PARTS, event("save", path="/a/r.pt", rows=[3, 8]))),
    ("the prediction fails", "cannot tell", predicted(*PARTS, works=False)),
    ("no prediction", "not reached", two()),
]


# Collectives, batches and decisions.


def batches(first: int, second: int, *events: Event, **values: Any) -> Evidence:
    return each(*([epoch(sizes=[2] * n, batches=n, yielded=n, **values)] for n in (first, second)), *events)


def graph(*nodes: int, longer: Sequence[int] = ()) -> Evidence:
    ranks, more = (
        both(collective(), step(), epoch(), *(batch(n, graph_nodes=count) for n, count in enumerate(counts)))
        for counts in (nodes, longer)
    )
    return evidence(ranks=ranks, runs={"graphs of longer epochs": more})


def writes(path: str, mode: str = "w", **values: Any) -> list[Event]:
    return [event("open", path=path, mode=mode, locks=[], **values)]


def following(source: str, *lines: dict[str, Any]) -> Callable[[Path], Evidence]:
    """Returns ranks that ran these lines of a source, which steps in line 3.

    Args:
        source: The loop.
        lines: For each rank, by the line of a condition: the lines after it, or the numbers that it reads.
    """

    def given(folder: Path) -> Evidence:
        path = folder / "loop.py"
        path.write_text(source)
        ranks = []
        for own in lines:
            times = {
                f"{path}:{line}": [
                    {"step": 1, "then": 0, "reads": {"loss": value}}
                    if isinstance(value, float)
                    else {"step": 1, "then": value, "reads": {}}
                    for value in values
                ]
                for line, values in own.items()
            }
            branches = event("branches", times=times)
            ranks.append([collective(), branches, step(stack=[f"{path}:3"]), END])
        run = records(*ranks)
        return evidence(ranks=run, runs={"numbers later": run})

    return given


def stopping(condition: str, *values: float) -> Callable[[Path], Evidence]:
    source = f"def main():\n    for epoch in range(9):\n        step()\n        if {condition}:\n            break\n"
    return following(source, *({4: [2.0, value]} for value in values))


def logged(*names: str, **values: Any) -> list[Event]:
    known = {"value": 0.5, "gradients": False, "at_once": False, "sync_dist": True} | values
    return [event("log", name=name, **known) for name in names]


REDUCE, LOG = collective(direct=True), collective(op="barrier", direct=True)
JOIN, OF_JOIN = event("join"), collective(direct=False)
ROWS["LD027"] = [
    ("a collective on rank 0", "fault", evidence(ranks=journals([REDUCE, LOG, REDUCE], [REDUCE, REDUCE]))),
    ("the collective on all ranks", NOTHING, evidence(ranks=journals([REDUCE, LOG], [REDUCE, LOG]))),
    ("a collective of a subgroup", NOTHING, evidence(ranks=journals([REDUCE | {"subgroup": True}, LOG], [LOG]))),
    ("logs in another order", "fault", each(logged("loss", "cat", "dog"), logged("loss", "dog", "cat"))),
    ("logs of other times", NOTHING, each(logged("cat", "cat", "dog"), logged("cat", "dog", "cat"))),
    ("logs of one rank", NOTHING, each(logged("cat", "dog", sync_dist=False), logged("dog"))),
    ("reduced at once", "fault", each(*(logged(*"aba"[n:], at_once=True, gradients=True) for n in (0, 1)))),
    ("shadowed under Join", NOTHING, evidence(ranks=journals([JOIN, OF_JOIN, REDUCE], [JOIN, REDUCE]))),
    ("not shadowed under Join", "fault", evidence(ranks=journals([JOIN, REDUCE, OF_JOIN], [JOIN, OF_JOIN]))),
]
ROWS["LD028"] = [
    ("rank 0 has more batches", "fault", batches(3, 2)),
    ("as many batches", NOTHING, batches(2, 2)),
    ("an endless stream", NOTHING, batches(3, 2, endless=True)),
    ("Join", "not applicable", batches(3, 2, event("join"))),
    ("a stream that was not read to its end", "cannot tell", batches(3, 2, iterable=True, drained=False)),
]
UNUSED = "Expected to have finished reduction; enable find_unused_parameters"
ROWS["LD029"] = [
    ("a parameter is not used", "fault", evidence(ranks=records([WRAPPED, *failed("RuntimeError", UNUSED)[0].events]))),
    ("all parameters are used", NOTHING, two(WRAPPED)),
    ("another error", "cannot tell", evidence(ranks=failed("ValueError", "no data"))),
    ("nothing is wrapped", "not reached", two()),
]
ROWS["LD031"] = [
    ("total += loss", "fault", graph(0, 9, 18, 27, longer=(0, 9, 18, 27, 36))),
    ("total += loss.item()", NOTHING, graph(0, 9, 9, 9)),
    ("the graphs of the last steps", NOTHING, graph(0, 9, 18, longer=(0, 9, 18, 18, 18))),
    ("two steps", "cannot tell", graph(0, 9)),
]
DATA = "/a/data.pt"
SAVE_STATE = "/lib/accelerate/accelerator.py:save_state"
ROWS["LD032"] = [
    ("all ranks write a file", "fault", two(*writes(DATA))),
    ("rank 0 writes a file", NOTHING, each(writes(DATA), [])),
    ("appended", "note", two(*writes("/a/log.txt", mode="a"))),
    ("options that Hydra writes", "note", two(*writes("/a/.hydra/config.yaml"))),
    ("a state that Accelerate writes", "note", two(*writes(DATA, by=SAVE_STATE))),
    ("a group is not destroyed", "note", two(event("init_process_group", direct=True))),
]
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
ROWS["LD034"] = [
    (
        "a rank decides by its own loss",
        "fault",
        following(LOOP, {6: [8, 7, 8], 8: [2, 2, 2]}, {6: [8, 8, 8], 8: [2, 2, 2]}),
    ),
    ("the ranks decide alike", NOTHING, following(LOOP, {6: [8, 7], 8: [2, 2]}, {6: [8, 7], 8: [2, 2]})),
    ("a decision by the rank", NOTHING, following(LOOP, {4: [5, 5]}, {4: [6, 6]})),
    ("a rank will stop by its own loss", "fault", stopping("loss > best", 1.5, 1.25)),
    ("rounding", NOTHING, stopping("loss > best", 1.5, 1.5 + 1e-9)),
    (
        "a schedule of each rank",
        "fault",
        each(*([event("metric of schedule", name="ReduceLROnPlateau", value=value)] for value in (0.5, 0.4))),
    ),
]


# Checkpoints.


def loads(matched: int, *keys: str) -> Event:
    return event(
        "load_state_dict", module="Net", matched=matched, strict=False, missing=["a.weight"], unexpected=[*keys]
    )


def copies(*digests: str, key: int = 1) -> dict[str, Any]:
    return {"copies": {key: ("dict", digests)}}


SURVEYS = [event("state", number, **copies(f"average {number}")) for number in range(4)]


def restarted(rate: float = 0.0125, **changes: Any) -> Evidence:
    """Returns a program that saves an average after step 3, and is started again with a rate and changes."""
    saved = event("saved", 3, optimizers=1, stateful=1, file="last.pt")
    saved |= {"tensors": ["w", "average"], "weights": ["w"], "states": ["moments"], **copies("average")}
    steps = [step(number, lr=[0.1 * 0.5**number]) for number in range(5)]
    begun: Event = {"weights": ["w"], "states": ["moments"], **copies("average", key=7), **changes}
    continued = [event("state", **begun), event("state", 1, **begun | copies("later", key=7))]
    runs = {"interrupted": both(END), "started again": both(*continued, step(lr=[rate]), END)}
    return evidence(ranks=both(*SURVEYS, *steps, saved, END), runs=runs)


def saving(**changes: Any) -> Evidence:
    """Returns a program that saves, and is not started again."""
    saved = event("saved", 3, optimizers=1, stateful=1, file="last.pt", tensors=["w"], weights=["w"], copies={})
    return evidence(ranks=both(*SURVEYS, step(), step(1), saved | changes, END))


ROWS["LD026"] = [
    ("other keys", "fault", two(loads(0, "module.a.weight"))),
    ("the keys of the module", NOTHING, two(loads(2))),
    ("no state is loaded", "not reached", two()),
]
ROWS["LD025"] = [
    ("an average is not in the checkpoint", "fault", saving(**copies("average"))),
    ("all is restored", NOTHING, restarted()),
    ("the rate begins again", "fault", restarted(0.1)),
    ("the program does not resume", "cannot tell", restarted(weights=["initial"])),
    ("nothing is saved", "not reached", two()),
]


@pytest.mark.parametrize(
    ("code", "expected", "given"),
    [
        pytest.param(code, expected, given, id=f"{code} {name}")
        for code in sorted(ROWS)
        for name, expected, given in ROWS[code]
    ],
)
def test_the_verdict(code: str, expected: str, given: Any, tmp_path: Path) -> None:
    verdict, message = found(code, given(tmp_path) if callable(given) else given)
    assert verdict == expected, message


@pytest.mark.parametrize("code", ["LD009", "LD010", "LD011", "LD016"])
def test_a_cause_of_other_weights_has_one_code(code: str) -> None:
    """These faults are read from one measurement."""
    *_, given = ROWS[code][0]
    assert [other for other in ("LD009", "LD010", "LD011", "LD016", "LD033") if found(other, given)[0] == "fault"] == [
        code
    ]  # type: ignore[arg-type]


def test_every_fault_has_a_faulty_and_a_mended_program() -> None:
    assert ROWS.keys() == load_checks().keys()
    for code, rows in ROWS.items():
        expected = [verdict for _, verdict, _ in rows]
        # The mended form of the first row is the second one.
        assert expected[0] in {"fault", DEPENDS}, code
        assert expected[1] == NOTHING, code
