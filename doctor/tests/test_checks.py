"""Faults on recorded events: what is reported of a faulty program, and what of its mended form and of others."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import MICRO_BATCHES, RankComparison
from ddp_doctor.evidence.requirements import ask
from ddp_doctor.examination import _Examination
from ddp_doctor.faults import choose_checks, load_checks
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

Event = dict[str, Any]
Events = Sequence[Event]
Tensors = dict[str, torch.Tensor]
SPEC = Spec(Target("mine:main"), world_size=2)
SAMPLER = "DistributedSampler"
# The parameters of an optimizer, and the gradients that two ranks compute for each of them.
KEYS = {"0:0": "weight", "0:1": "bias"}
OWN = torch.linspace(0, 1, 4), torch.linspace(2, 1, 4)
MEAN = (OWN[0] + OWN[1]) / 2
END: Event = {"kind": "end", "step": 0, "place": "", "reached_end": True, "failures": [], "imported": ([], {})}


def event(kind: str, step: int = 0, place: str = "mine.py:1 in main", **values: Any) -> Event:
    return {"kind": kind, "step": step, "place": place, **values}


def step(number: int = 0, **values: Any) -> Event:
    known: Event = {"names": KEYS, "optimizer": 0, "name": "SGD", "frozen": [], "stale": [], "unowned": {}}
    return event("step", number, **(known | {"loaded": [], "lr": [0.1], "base": [0.0], "sharded": False} | values))


def epoch(**values: Any) -> Event:
    known: Event = {"trains": True, "iterable": False, "drained": True, "complete": True, "indices": [0, 1, 2, 3]}
    known |= {"loader": 0, "iteration": 0, "epoch": 0, "base": 0, "dataset": "Digits", "samples": 8, "sampler": SAMPLER}
    known |= {"set_epoch": [SAMPLER], "ascending": False, "sizes": [2, 2], "batches": 2, "yielded": 2, "workers": 0}
    return event("epoch", **(known | {"worker_generators": []} | values))


def batch(number: int = 0, **values: Any) -> Event:
    known: Event = {"loader": 0, "iteration": 0, "number": number, "trains": True, "indices": [], "size": 2}
    return event("batch", **({"step": number} | known | values))


def forward(number: int = 0, **values: Any) -> Event:
    known: Event = {"gradients": True, "module": "Net", "modes": {}, "sensitive": [], "random": []}
    return event("forward", number, **(known | values))


def wrapped_pass(number: int = 0, **values: Any) -> Event:
    known: Event = {"gradients": True, "synchronizes": True, "buffers": False}
    return event("ddp_forward", number, **(known | values))


def collective(number: int = 0, op: str = "all_reduce", **values: Any) -> Event:
    return event("collective", number, op=op, **({"value": None, "size": 0, "subgroup": False} | values))


WRAPPED = event("ddp", ignored=[])


def records(*events: Events) -> list[RankRecord]:
    """Returns ranks with these events each."""
    return [RankRecord(rank, list(own)) for rank, own in enumerate(events)]


def both(*events: Event) -> list[RankRecord]:
    """Returns two ranks with the same events."""
    return records(events, events)


def journals(*events: Events) -> list[RankRecord]:
    """Returns ranks that have called these collectives and passes."""
    return [RankRecord(rank, [collective(), END], journal=list(own)) for rank, own in enumerate(events)]


def failed(kind: str, message: str) -> list[RankRecord]:
    """Returns a rank that has failed."""
    return records([event("error", type=kind, message=message, trace=f"Traceback\n{kind}: {message}", input=False)])


def trained(
    first: torch.Tensor | Tensors, second: torch.Tensor | Tensors, *events: Event, **more: Any
) -> list[RankRecord]:
    """Returns two ranks that take a step with these gradients; the weights are equal if the gradients are.

    Args:
        first: The gradients that the optimizer of rank 0 applies: one for all parameters, or one of each.
        second: Those of rank 1.
        events: What happens before the step on both ranks.
        more: Of each rank: `each`, its events before the step; `steps`, values of the step; `after`, the digest of its
            weights; `later`, its events after the step.
    """
    found = []
    for rank, applied in enumerate((first, second)):
        values: Tensors = {}
        for key in KEYS:
            gradient = applied[key] if isinstance(applied, dict) else applied
            values |= {f"before/0/{key}": torch.ones(4), f"applied/0/{key}": gradient, f"local/0/{key}": OWN[rank]}
        digests = {key: more["after"][rank] if "after" in more else str(values[f"applied/0/{key}"]) for key in KEYS}
        before = [*events, *more.get("each", ([], []))[rank]]
        steps = [step(**more.get("steps", ({}, {}))[rank]), event("stepped", weights=digests)]
        found.append(RankRecord(rank, [*before, *steps, *more.get("later", ([], []))[rank], END], values))
    return found


def failing(spec: Spec) -> Run:
    return Run(spec, Path(), [], later=Run(spec, Path(), []) if spec.later else None)


def evidence(
    reference: RankComparison | None = None,
    compared: RankComparison | None = None,
    runs: dict[str, list[RankRecord]] | None = None,
    **ranks: list[RankRecord],
) -> Evidence:
    """Returns the evidence of an examination, in which all other runs fail.

    Args:
        reference: The comparison with one process.
        compared: That with synchronized batch norm.
        runs: Runs by names with spaces.
        ranks: Runs by their names; `single` and `ranks` are the first two.
    """
    given = Evidence(SPEC, SimpleNamespace(forks=False, run=failing), {})  # type: ignore[arg-type]
    for name, own in (ranks | (runs or {})).items():
        given.runs[name] = Run(replace(SPEC, world_size=max(1, len(own))), Path(), own)
    given.reference = reference or given.reference
    if compared:
        given.compare = lambda **_: compared  # type: ignore[method-assign]
    return given


def found(code: str, given: Evidence) -> tuple[str, str]:
    """Returns the verdict of a check, and what it says; of a check that is made and finds nothing, nothing."""
    findings = ask(load_checks()[code], given)
    return ", ".join(finding.verdict.value for finding in findings), " ".join(finding.message for finding in findings)


# What a row expects of a check that is made and finds nothing.
NOTHING = ""
DEPENDS = "depends on the number of devices"
# By code: what the program does, the verdict, and the evidence.
ROWS: dict[str, list[tuple[str, str, Evidence]]] = {}
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


def epochs(*pair: Event, runs: dict[str, Any] | None = None, told: bool = False) -> Evidence:
    numbers = [event("set_epoch", number=0)] if told else []
    named = {name: both(*found) for name, found in (runs or {}).items()}
    return evidence(ranks=both(collective(), step(), *numbers, *pair), runs=named)


def stream(*samples: str) -> list[Event]:
    batches = [batch(number, samples=[*part]) for number, part in enumerate(samples)]
    return [*batches, epoch(iterable=True, indices=[])]


def sampled(first: Sequence[int], second: Sequence[int], sampler: str = "Balanced") -> Evidence:
    one = records([epoch(sampler=sampler, indices=[*range(16)], sizes=[4] * 4, samples=16)])
    ranks = ([epoch(indices=[*indices], samples=16)] for indices in (first, second))
    return each(*ranks, single=one)


def permuted(*rows: str) -> Evidence:
    return each(*([forward(rows=[*own[n : n + 2]]) for n in range(0, len(own), 2)] for own in rows))


def workers(*states: str) -> Evidence:
    begun = ([{"NumPy": state, "torch": "", "Python": ""}] for state in states)
    found = (epoch(iteration=n, epoch=n, workers=1, worker_generators=one) for n, one in enumerate(begun))
    return two(calls(**RANDOM), *found)


ORDER = [3, 1, 0, 2]
AGAIN = epoch(indices=ORDER), epoch(indices=ORDER, iteration=1, epoch=1)
CHANGED = epoch(indices=ORDER), epoch(indices=ORDER[::-1], iteration=1, epoch=1)
ROWS["LD001"] = [
    ("nothing calls set_epoch", "fault", epochs(*AGAIN, runs={"set_epoch": CHANGED})),
    ("the order changes", NOTHING, epochs(*CHANGED)),
    ("shortened epochs", NOTHING, epochs(*AGAIN, told=True, runs={"set_epoch": CHANGED, "whole epochs": CHANGED})),
    ("whole epochs fail", "cannot tell", epochs(*AGAIN, told=True, runs={"set_epoch": CHANGED})),
]
ROWS["LD002"] = [
    ("no sampler", "fault", two(calls(), epoch(indices=ORDER))),
    ("a sampler", NOTHING, each([epoch(indices=[0, 2])], [epoch(indices=[1, 3])], calls())),
    ("another permutation on each rank", "fault", permuted("abcdefgh", "efghijkl")),
    ("the same samples without a loader", "fault", permuted("abcdefgh", "abcdefgh")),
    ("some samples fill a batch", NOTHING, each([epoch(indices=[0, 2, 4])], [epoch(indices=[1, 3, 0])], calls())),
    ("contents are not known", "unclear", two(epoch(indices=ORDER))),
    ("data of each rank", "not applicable", each([calls(), epoch()], [calls(100), epoch()])),
    ("independent runs", "not applicable", evidence(ranks=both(step(), epoch()))),
]
ROWS["LD003"] = [
    ("each rank reads all", "fault", two(*stream("ab", "cd"))),
    ("each rank reads its part", NOTHING, each(stream("ab", "cd"), stream("ef", "gh"))),
]
EVEN, ODD = range(0, 16, 2), range(1, 16, 2)
ROWS["LD004"] = [
    ("a sampler is replaced and split", "fault", sampled(range(4), range(4))),
    ("a sampler is split", NOTHING, sampled(EVEN, ODD)),
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
]


# Gradients and weights of the ranks.


def clip(norm: float = 70.0) -> Event:
    return event("clip", function="clip_grad_norm_", limit=1.0, norm=norm)


def unexplained(ranks: list[RankRecord], reference: RankComparison = EQUAL, **values: Any) -> Evidence:
    return replace(evidence(reference, ranks=ranks, runs={"numbers later": ranks}), **values)


HALF = {"0:0": OWN[0], "0:1": MEAN}, {"0:0": OWN[1], "0:1": MEAN}
ROWS["LD009"] = [
    ("nothing averages", "fault", stepped(*OWN)),
    ("gradients are averaged", NOTHING, stepped(MEAN, MEAN)),
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
    ("rank 1 takes more steps", "fault", stepped(MEAN, MEAN, later=([], [step(1), event("stepped", 1, weights={})]))),
]
ACCUMULATED = wrapped_pass(synchronizes=False), wrapped_pass()
ROWS["LD016"] = [
    ("no_sync on the last pass", "fault", stepped(*OWN, WRAPPED, *ACCUMULATED[::-1])),
    ("no_sync on the first pass", NOTHING, stepped(MEAN, MEAN, WRAPPED, *ACCUMULATED)),
]
ROWS["LD033"] = [
    ("a collective is not waited for", "fault", two(event("not_waited", op="all_reduce", of="mine.py:7 in main"))),
    ("several passes", "cannot tell", stepped(MEAN, MEAN, WRAPPED, wrapped_pass(), wrapped_pass())),
]
SAME, APART = trained(MEAN, MEAN), trained(MEAN, MEAN, after="ab")
ROWS["LD036"] = [
    ("an optimizer of each rank", "fault", unexplained(APART)),
    ("equal weights", NOTHING, unexplained(SAME)),
    ("another gradient than one process", "unclear", unexplained(SAME, reference=RankComparison(0.5))),
    ("not compared", "cannot tell", unexplained(SAME, reference=RankComparison(cannot="it hung"))),
]


# The ranks and one process.


def compared(difference: float = 0.5, ranks: list[RankRecord] = STEPS, **values: Any) -> Evidence:
    return evidence(RankComparison(difference, differences=(difference,), **values), EQUAL, ranks=ranks)


def scaled(factor: float, residual: float = 0.0, **values: Any) -> Evidence:
    return compared(abs(factor - 1) + residual, weights=(0.5, 0.5), scale=factor, left=residual, **values)


def combined(**values: Any) -> Evidence:
    return compared(weights=(0.5, 0.4), residual=0.1, **values)


NORM = both(collective(), forward(sensitive=["norm"]), step())
ROWS["LD012"] = [
    ("batch norm of each rank", DEPENDS, compared(ranks=NORM, module="norm", module_class="BatchNorm1d")),
    ("synchronized batch norm", NOTHING, compared(1e-15, NORM)),
    ("outputs are not known", "cannot tell", combined(modules_seen=False)),
]
ROWS["LD013"] = [
    ("unequal numbers of labels", "fault", compared(weights=(0.6, 0.4))),
    ("equal numbers of labels", NOTHING, compared(1e-15, weights=(0.5, 0.5))),
    ("nearly equal numbers", "note", compared(4e-4, weights=(0.5002, 0.4998))),
]
ROWS["LD014"] = [
    ("gradients are summed", "fault", scaled(2)),
    ("gradients are averaged", NOTHING, scaled(1)),
    ("the loss is divided twice", "fault", scaled(0.5)),
    ("micro-batches and a factor of no division", "cannot tell", scaled(1.3, method=MICRO_BATCHES)),
    ("not compared", "cannot tell", evidence(RankComparison(cannot="it hung"), ranks=STEPS)),
]
ROWS["LD015"] = [
    ("gathered with gradient", NOTHING, compared(1e-15, both(collective(op="all_gather"), step()), weights=(0.5, 0.5))),
    ("a module combines the samples", DEPENDS, combined(module="mix", module_class="Mix")),
    ("outputs are not known", "cannot tell", combined(modules_seen=False)),
]


# Schedules, optimizers and modes.


def schedule(ours: Callable[[int], float], alone: Callable[[int], float]) -> Evidence:
    several, one = ([step(n, lr=[rate(n)]) for n in range(steps)] for rate, steps in ((ours, 3), (alone, 14)))
    return evidence(ranks=both(*several, END), single=records([*one, END]))


def cosine(number: float, total: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * min(number / total, 1)))


def scaler(calls: str) -> Evidence:
    events = {"scale": event("scale", scale=1024.0), "unscale": event("unscale"), "step": event("scaler_step")}
    return two(event("scaler", enabled=True), *((events | {"clip": clip()})[name] for name in calls.split()))


def optimizers(*events: Event, **values: Any) -> Evidence:
    return evidence(ranks=both(*events, step(**values), step(1, **values)))


def modes(*training: bool) -> list[Event]:
    found = []
    for number, mode in enumerate(training):
        found += [forward(number, modes={"drop": mode}, sensitive=["drop"]), event("backward", number), step(number)]
    return found


def evaluated(*events: Event, trains: bool = False, loader: int = 1, **modes: bool) -> Evidence:
    call = forward(gradients=False, random=[name for name, training in modes.items() if training], modes=modes)
    return two(epoch(), epoch(trains=trains, loader=1), batch(trains=False, loader=loader), call, *events)


def frozen(*digests: str) -> Evidence:
    return two(*(forward(n, frozen_norms={"norm": one}, sensitive=["norm"]) for n, one in enumerate(digests)))


ROWS["LD017"] = [
    ("a schedule that advances once per rank", "fault", schedule(lambda n: cosine(2 * n, 20), lambda n: cosine(n, 40))),
    ("a schedule by samples", NOTHING, schedule(lambda n: cosine(n, 20), lambda n: cosine(n, 40))),
    ("a warm-up to the rate of all ranks", DEPENDS, schedule(lambda n: 1 + n / 3, lambda _: 1)),
]
ROWS["LD018"] = [
    ("clipped while scaled", "fault", scaler("scale clip step")),
    ("unscaled before", NOTHING, scaler("scale unscale clip step")),
    ("unscaled for the norm that is logged", "fault", scaler("scale clip unscale step")),
    ("two optimizers", NOTHING, scaler("scale unscale clip unscale clip step step")),
]
FORGOTTEN: Event = {"unowned": {"body.weight": "same"}}
ROWS["LD019"] = [
    ("parameters belong to no optimizer", "fault", optimizers(**FORGOTTEN)),
    ("all parameters belong to one", NOTHING, optimizers()),
    ("forgotten parameters with loaded weights", "note", optimizers(**FORGOTTEN, loaded=["body.weight"])),
]
ROWS["LD020"] = [
    ("zero_grad is missing", "fault", optimizers(stale=["weight"])),
    ("gradients are cleared", NOTHING, optimizers()),
]
ROWS["LD021"] = [
    ("eval() without train()", "fault", two(*modes(True, False))),
    ("train() in each epoch", NOTHING, two(*modes(True, True))),
    ("evaluation mode from the beginning", "note", two(*modes(False))),
    ("no forward pass", "cannot tell", two()),
]
DROPS = event("dropout", rate=0.5)
ROWS["LD022"] = [
    ("F.dropout in evaluation mode", "fault", evaluated(DROPS, drop=False)),
    ("dropout in training only", NOTHING, evaluated(drop=False)),
    ("Monte Carlo dropout", "note", evaluated(DROPS, drop=True, norm=False)),
    ("without gradients in training", NOTHING, evaluated(DROPS, drop=True, loader=0)),
]
ROWS["LD035"] = [
    ("a frozen part in training mode", "fault", frozen("a", "a")),
    ("a part that is trained", NOTHING, frozen("a", "b")),
]


def evaluation(first: list[int], second: list[int], *events: Event) -> Evidence:
    return each(*([epoch(trains=False, loader=1, indices=own, sizes=[3]), *events] for own in (first, second)))


ROWS["LD023"] = [
    ("a sample counts twice", "fault", evaluation([0, 2, 4], [1, 3, 0], collective(value=6))),
    ("each sample counts once", NOTHING, evaluation([0, 2, 4], [1, 3])),
    ("no number is seen", "unclear", evaluation([0, 2, 4], [1, 3, 0])),
    ("the indices are not known", "cannot tell", two(epoch(trains=False, drained=False))),
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
    ("reduced at once", "fault", each(*(logged(*"aba"[n:], at_once=True, gradients=True) for n in (0, 1)))),
    ("shadowed under Join", NOTHING, evidence(ranks=journals([JOIN, OF_JOIN, REDUCE], [JOIN, REDUCE]))),
    ("not shadowed under Join", "fault", evidence(ranks=journals([JOIN, REDUCE, OF_JOIN], [JOIN, OF_JOIN]))),
]
SHOWN = epoch(batches=9, sizes=[], place="mine.py:9 in show")
ROWS["LD028"] = [
    ("rank 0 has more batches", "fault", batches(3, 2)),
    ("as many batches", NOTHING, batches(2, 2)),
    ("an endless stream", NOTHING, batches(3, 2, endless=True)),
    ("rank 0 shows images", NOTHING, each([SHOWN, epoch(batches=2, sizes=[])], [epoch(batches=2, sizes=[])])),
    ("Join", "not applicable", batches(3, 2, event("join"))),
    ("a stream that was not read to its end", "cannot tell", batches(3, 2, iterable=True, drained=False)),
]
UNUSED = "Expected to have finished reduction; enable find_unused_parameters"
ROWS["LD029"] = [
    ("a parameter is not used", "fault", evidence(ranks=records([WRAPPED, *failed("RuntimeError", UNUSED)[0].events]))),
    ("all parameters are used", NOTHING, two(WRAPPED)),
    ("another error", "cannot tell", evidence(ranks=failed("ValueError", "no data"))),
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


def loads(matched: int, *keys: str) -> Event:
    known = {"module": "Net", "strict": False, "missing": ["a.weight"]}
    return event("load_state_dict", matched=matched, unexpected=[*keys], **known)


ROWS["LD026"] = [
    ("other keys", "fault", two(loads(0, "module.a.weight"))),
    ("the keys of the module", NOTHING, two(loads(2))),
]


@pytest.mark.parametrize(
    ("code", "expected", "given"),
    [
        pytest.param(code, expected, given, id=f"{code} {name}")
        for code in sorted(ROWS)
        for name, expected, given in ROWS[code]
    ],
)
def test_the_verdict(code: str, expected: str, given: Evidence) -> None:
    verdict, message = found(code, given)
    assert verdict == expected, message


def test_every_check_says_what_it_needs() -> None:
    # Of a program that only imports torch, files and groups alone are known.
    examination = _Examination(evidence(ranks=both(END)), load_checks())
    examination._check()
    assert [code for code, state in examination.states.items() if not state.reason] == ["LD032"]


def test_a_check_that_is_not_wanted_explains_what_it_knows() -> None:
    examination = _Examination(stepped(*OWN), choose_checks(["LD036"], []))
    examination._check()
    assert not examination.findings
