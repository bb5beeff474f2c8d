"""Checks and stages on recorded events, without an examination: what is a fault, and what is not."""

from __future__ import annotations

import fcntl
import importlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ddp_doctor.evidence import decisions
from ddp_doctor.evidence.communication import averaged_weights, hook_effects
from ddp_doctor.evidence.comparisons import compare_evaluation
from ddp_doctor.evidence.evidence import Evidence
from ddp_doctor.evidence.rank_comparison import RankComparison, compare_records
from ddp_doctor.evidence.requirements import unmet
from ddp_doctor.examination import _Examination
from ddp_doctor.faults import describe, ld036_unexplained_difference, load_checks
from ddp_doctor.files.protection import Protection
from ddp_doctor.findings import Finding
from ddp_doctor.probes.draws import DrawFlow, RandomReplay, seed_own
from ddp_doctor.probes.generators import OwnGenerators, drawn, states_of_global, values_drawn
from ddp_doctor.probes.written_files import Locks, is_cached, rows_of, rows_of_file
from ddp_doctor.records.recorder import packed, unpacked
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import PACKAGE, Spec, Target

Event = dict[str, Any]
SPEC = Spec(Target("mine:main"), world_size=2)


class Recorded:
    """Gives runs that were recorded, by their purpose and number of ranks."""

    def __init__(self, **runs: list[RankRecord]) -> None:
        self.recorded = runs

    def run(self, spec: Spec, environment: dict[str, str] | None = None) -> Run:
        return Run(spec, Path(), self.recorded.get(f"{spec.purpose}{spec.world_size}", []))

    def preload(self, names: Sequence[str] = ()) -> None:
        pass

    def close(self) -> None:
        pass


def event(kind: str, step: int = 0, place: str = "mine.py:1 in main", **values: Any) -> Event:
    return {"kind": kind, "step": step, "place": place, **values}


def records(*events: list[Event], tensors: Sequence[dict[str, torch.Tensor]] = ({}, {})) -> list[RankRecord]:
    return [RankRecord(rank, found, dict(tensors[rank])) for rank, found in enumerate(events)]


def evidence(runner: Recorded | None = None, **runs: list[RankRecord]) -> Evidence:
    return Evidence(SPEC, runner or Recorded(), {name: Run(SPEC, Path(), ranks) for name, ranks in runs.items()})


def verdicts(code: str, given: Evidence) -> list[str]:
    check: ModuleType = importlib.import_module(f"ddp_doctor.faults.{describe()[code].module}")
    findings: list[Finding] = check.check(given)
    return [finding.verdict.value for finding in findings]


def reason(code: str, given: Evidence) -> str:
    """Returns why a check was not made, with its state; empty if it was."""
    found = unmet(given, load_checks()[code].NEEDS)
    return f"{found.verdict.value}: {found.message}" if found else ""


def failed(kind: str, message: str) -> list[RankRecord]:
    return records([event("error", type=kind, message=message, trace=f"Traceback\n{kind}: {message}", input=False)])


# Communication hooks.

MEAN = torch.linspace(-1, 1, 64)


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ((MEAN, MEAN), "mean"),
        ((MEAN.half().float(), MEAN.half().float()), "mean"),
        ((MEAN.bfloat16().float(), MEAN.bfloat16().float()), "mean"),
        ((2 * MEAN.half().float(), 2 * MEAN.half().float()), "scaled"),
        ((MEAN / 2, MEAN / 2), "scaled"),
        ((MEAN + 0.1, MEAN - 0.1), "local"),
        ((torch.zeros(64), torch.zeros(64)), ""),
        ((MEAN, torch.zeros(64)), ""),
        # PowerSGD keeps one direction of the mean.
        ((MEAN.clamp(min=0), MEAN.clamp(min=0)), ""),
    ],
    ids=["plain", "float16", "bfloat16", "summed", "divided twice", "not averaged", "zeros", "zeros once", "low rank"],
)
def test_a_hook_is_compared_with_the_mean_up_to_compression(results: tuple[torch.Tensor, ...], said: str) -> None:
    tensors = [
        {"hook_in/0/0.0": MEAN + sign, "hook_out/0/0.0": result}
        for sign, result in zip((0.1, -0.1), results, strict=True)
    ]
    ranks = records([event("comm_hook", name="mine")], [event("comm_hook", name="mine")], tensors=tensors)
    (found,) = hook_effects(Run(SPEC, Path(), ranks))
    assert (found.is_mean, found.is_scaled, found.local) == (
        said in {"mean", "scaled"},
        said == "scaled",
        said == "local",
    )
    assert verdicts("LD014", evidence(ranks=ranks)) == (["fault"] if said == "scaled" else [])


@pytest.mark.parametrize("averaged", [True, False])
def test_weights_that_are_averaged_between_steps_are_no_fault(averaged: bool) -> None:
    after = [torch.ones(4), 3 * torch.ones(4)]
    begin = [2 * torch.ones(4)] * 2 if averaged else after
    steps = [[event("step", step, names={"0:0": "w"}, optimizer=0) for step in (0, 1)] for _ in range(2)]
    for events, value in zip(steps, after, strict=True):
        events += [event("stepped", step, weights={"0:0": str(value)}) for step in (0, 1)]
    tensors = []
    for sign, value, start in zip((1, -1), after, begin, strict=True):
        gradient = torch.linspace(0, sign, 4) + (sign > 0)
        tensors.append(
            {"after/0/0:0": value, "before/1/0:0": start, "applied/0/0:0": gradient, "local/0/0:0": gradient}
        )
    given = evidence(ranks=records(*steps, tensors=tensors))
    assert bool(averaged_weights(given)) is averaged
    assert verdicts("LD009", given) == ([] if averaged else ["fault"])
    assert ("not applicable" in reason("LD009", given)) is averaged


@pytest.mark.parametrize(
    ("what", "scales", "own", "code"),
    [
        ("averaged", (1.0, 1.0), 0.0, ""),
        ("divided by all ranks once more", (0.5, 0.5), 0.0, ""),
        ("clipped on rank 0", (0.01, 1.0), 0.0, "LD011"),
        ("not averaged", (1.0, 1.0), 1.0, "LD009"),
        # Neither the mean nor the rank's own: what is left of an earlier step, or compressed.
        ("mixed", (1.0, 1.0), 0.5, ""),
    ],
)
@pytest.mark.parametrize("in_parts", [True, False])
def test_gradients_of_parts_that_ranks_update_for_each_other_are_compared(
    what: str, scales: tuple[float, ...], own: float, code: str, in_parts: bool
) -> None:
    names, local = {"0:0": "a", "0:1": "b"}, [torch.linspace(0, 1, 4), torch.linspace(2, 1, 4)]
    ranks = []
    for rank in range(2):
        # All have the same weights afterwards, since each part is sent to the other rank.
        events = [event("step", names=names, optimizer=0, lr=[0.1]), event("stepped", weights=dict.fromkeys(names, ""))]
        events += [event("part", keys=[f"0:{rank}"])] if in_parts else []
        applied = scales[rank] * (own * local[rank] + (1 - own) * (local[0] + local[1]) / 2)
        tensors = {
            f"{kind}/0/{key}": value for key in names for kind, value in (("applied", applied), ("local", local[rank]))
        }
        ranks.append(RankRecord(rank, events, tensors))
    for each in ("LD009", "LD011"):
        assert verdicts(each, evidence(ranks=ranks)) == (["fault"] if each == code and in_parts else []), what


@pytest.mark.parametrize(
    ("size", "hook", "expected"),
    [(1e-3, False, ["fault"]), (1e-9, False, []), (1e-3, True, ["fault"]), (3e-8, True, [])],
    ids=["lost", "rounding", "lost by a hook", "below 16 bits"],
)
def test_a_gradient_that_became_zero_is_a_fault_unless_it_was_rounding(
    size: float, hook: bool, expected: list[str]
) -> None:
    """The bias of a key in attention has a gradient of zero up to rounding, as do hooks that compress."""
    names, large = {"0:0": "weight", "0:1": "bias"}, torch.linspace(0, 1e-2, 4)
    local = [torch.full((4,), (1 + rank) * size) for rank in range(2)]
    step = event("step", names=names, optimizer=0, lr=[0.1])
    forward = event("ddp_forward", gradients=True, synchronizes=True)
    events = [event("ddp"), *([event("comm_hook", name="fp16")] if hook else []), forward, step]
    tensors = [
        {"applied/0/0:0": large, "local/0/0:0": large, "applied/0/0:1": torch.zeros(4), "local/0/0:1": part}
        for part in local
    ]
    single = records([step], tensors=[{"applied/0/0:1": local[0]}])
    given = evidence(ranks=records(events, events, tensors=tensors), single=single)
    assert verdicts("LD033", given) == expected


@pytest.mark.parametrize("name", ["rank == 0", "trainer.is_world_process_zero()", "self.is_global_zero", "is_master"])
def test_a_name_of_a_rank_decides_nothing(name: str) -> None:
    assert decisions._RANK.search(name)
    assert not decisions._RANK.search("mask.nonzero().any() or loss < best")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("scale clip step", ["fault"]),
        ("scale unscale clip step", []),
        # Unscaled for the norm that is logged.
        ("scale clip unscale step", ["fault"]),
        ("scale scale clip step", ["fault"]),
        ("scale unscale clip step scale unscale clip step", []),
        ("scale unscale clip step scale clip step", ["fault"]),
        ("scale unscale clip unscale clip step step", []),
    ],
)
def test_a_clip_of_scaled_gradients_is_found_wherever_they_are_unscaled(calls: str, expected: list[str]) -> None:
    values = {
        "scale": event("scale", scale=1024.0),
        "unscale": event("unscale"),
        "clip": event("clip", function="clip_grad_norm_", limit=1.0, norm=70.0),
        "step": event("scaler_step"),
    }
    events = [event("scaler", enabled=True), *(values[name] for name in calls.split())]
    assert verdicts("LD018", evidence(ranks=records(events, events))) == expected


# Files.


def opened(path: str, mode: str = "w", locks: Sequence[str] = ()) -> Event:
    return event("open", path=path, mode=mode, locks=list(locks))


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([opened("/a/model.pt")], ["fault"]),
        ([opened("/a/log.txt", "a")], ["note"]),
        ([opened("/a/.hydra/config.yaml")], ["note"]),
        ([opened("/a/x.lock", "w"), event("lock", path="/a/x.lock")], []),
        ([opened("/a/x.lock", "x")], []),
        ([opened("/a/data.pt", locks=["/a/x.lock"])], []),
    ],
    ids=["a file", "appended", "options that Hydra writes", "a lock file", "created exclusively", "under a lock"],
)
def test_a_file_that_ranks_write_one_after_the_other_is_no_fault(events: list[Event], expected: list[str]) -> None:
    if events[0]["mode"] == "x":
        events = [*events, event("lock", path=events[0]["path"])]
    assert verdicts("LD032", evidence(ranks=records(events, events))) == expected


def test_different_locks_protect_nothing() -> None:
    given = records([opened("/a/data.pt", locks=["/a/0.lock"])], [opened("/a/data.pt", locks=["/a/1.lock"])])
    assert verdicts("LD032", evidence(ranks=given)) == ["fault"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/hf/datasets/csv/data.arrow", True),
        ("/home/me/.cache/pip/x", True),
        ("/triton/kernel.json", True),
        ("/hf2/model.pt", False),
        ("/home/me/project/model.pt", False),
    ],
)
def test_files_of_a_cache_are_those_of_a_library(path: str, expected: bool) -> None:
    folders = {"HOME": "/home/me", "HF_HOME": "/hf", "TRITON_CACHE_DIR": "/triton", "PROJECT_HOME": "/home/me/project"}
    assert is_cached(path, folders) is expected


def test_a_group_that_is_not_destroyed_is_a_note() -> None:
    events = [event("init_process_group", direct=True), event("end", reached_end=True)]
    assert verdicts("LD032", evidence(ranks=records(events, events))) == ["note"]


def test_locks_are_held_until_they_are_released(tmp_path: Path) -> None:
    seen: list[str] = []
    locks = Locks(seen.append)
    path = str(tmp_path / "x.lock")
    with Path(path).open("w") as file:
        locks.see("fcntl.flock", (file.fileno(), fcntl.LOCK_EX))
        assert locks.held() == [path]
        locks.see("fcntl.flock", (file.fileno(), fcntl.LOCK_UN))
        assert not locks.held()
        locks.see("fcntl.lockf", (file.fileno(), fcntl.LOCK_EX, 0, 0, 0))
    assert seen == [path, path]
    assert not locks.held()


@pytest.mark.parametrize(("rows", "expected"), [([12], ["fault"]), ([3, 24], []), ([], [])])
def test_only_a_file_with_as_many_rows_as_the_rank_has_predictions_may_lack_those_of_others(
    rows: list[int], expected: list[str]
) -> None:
    epochs = [
        event("epoch", trains=False, loader=0, iteration=0, iterable=False, drained=True, ascending=True, base=0)
        | {"indices": list(range(rank, 24, 2)), "samples": 24, "set_epoch": [], "sampler": "S"}
        for rank in range(2)
    ]
    predicted = records([epochs[0], event("save", path="/a/r.pt", rows=rows)], [epochs[1]])
    single = records([event("end", reached_end=True, predicts=True)])
    assert verdicts("LD030", evidence(ranks=predicted, single=single, predict=predicted)) == expected


def test_rows_are_those_of_predictions(tmp_path: Path) -> None:
    assert rows_of([torch.ones(8, 2), torch.ones(4, 2)]) == [2, 4, 8, 12]
    assert rows_of({"accuracy": 0.5, "steps": 3}) == []
    (tmp_path / "a.csv").write_text("index,value\n1,2\n3,4\n")
    (tmp_path / "a.json").write_text('{"values": [1, 2, 3]}')
    np.save(tmp_path / "a.npy", np.ones((5, 2)))
    assert [rows_of_file(tmp_path / f"a.{kind}") for kind in ("csv", "json", "npy", "txt")] == [[3, 2], [3], [5], []]


# Optimizers.


@pytest.mark.parametrize(("loaded", "expected"), [([], ["fault"]), (["body.weight"], ["note"])])
def test_forgotten_parameters_with_loaded_weights_are_a_note(loaded: list[str], expected: list[str]) -> None:
    steps = [
        event("step", step, optimizer=0, name="SGD", names={"0:0": "head"}, frozen=[], loaded=loaded)
        | {"unowned": {"body.weight": "same"}}
        for step in (0, 1)
    ]
    assert verdicts("LD019", evidence(ranks=records(steps, steps))) == expected


# Random numbers.


def batches(rank: int, **changes: Any) -> list[Event]:
    state = dict.fromkeys(("torch", "NumPy", "Python"), "same")
    found = [event("ddp"), event("seed", seed=0, generator="NumPy", place="mine.py:7 in main")]
    for number in range(4):
        before = {name: f"{value} {number}" for name, value in state.items()}
        found.append(
            event(
                "batch", number, loader=0, iteration=0, number=number, indices=[2 * number + rank], size=1, trains=True
            )
            | {"generators": before, "at_step": before, "drawn": 0, "hidden": {}, "flows": []}
            | {key: value(before) if callable(value) else value for key, value in changes.items()}
        )
    found.append(event("epoch", trains=True, loader=0, iteration=0, base=0, dataset="Mine", indices=[rank]))
    found[-1]["worker_generators"] = []
    return found


def drawing(**values: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda before: before | values


CALLS = event("calls", base=0, random=1.0, generators=["NumPy"], dataset="Mine", samples={})
NOISE = {"op": "randn_like", "values": 8, "drops": False, "place": "mine.py:9 in main"}


@pytest.mark.parametrize(
    ("changes", "more", "expected"),
    [
        ({"drawn": 8, "flows": [NOISE | {"into": "data"}]}, [], ["fault"]),
        ({"drawn": 8, "flows": [NOISE | {"into": "model"}]}, [], ["note"]),
        ({"drawn": 1}, [], []),
        ({"hidden": {"NumPy": 300}}, [], ["fault"]),
        ({"hidden": {"Python": 300}}, [], ["fault"]),
        ({"hidden": {"NumPy": 4}}, [], ["note"]),
        ({"at_step": drawing(NumPy="later")}, [CALLS], ["fault"]),
        # A sampler or a collate_fn draws.
        ({"at_step": drawing(NumPy="later")}, [], ["note"]),
        ({}, [CALLS], []),
    ],
    ids=["noise", "mask", "scalar", "NumPy noise", "Python noise", "NumPy scalar", "dataset", "sampler", "no draws"],
)
def test_equal_draws_are_a_fault_if_they_decide_the_data(
    changes: dict[str, Any], more: list[Event], expected: list[str]
) -> None:
    ranks = records(*([*batches(rank, **changes), *more] for rank in range(2)))
    assert verdicts("LD008", evidence(ranks=ranks)) == expected
    for rank in ranks:
        for found in rank.of_kind("batch"):
            for name in ("generators", "at_step"):
                found[name] = {key: f"{value} of rank {rank.rank}" for key, value in found[name].items()}
    assert verdicts("LD008", evidence(ranks=ranks)) == []


@pytest.mark.parametrize("equal", [True, False])
def test_workers_that_begin_equally_on_all_ranks_are_a_fault(equal: bool) -> None:
    ranks = records(*([*batches(rank), CALLS] for rank in range(2)))
    for rank in ranks:
        rank.training_epochs[0]["worker_generators"] = [
            {"NumPy": "a" if equal else f"{rank.rank}", "torch": "", "Python": ""}
        ]
    assert verdicts("LD008", evidence(ranks=ranks)) == (["fault"] if equal else [])


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder, self.times = nn.Linear(4, 6), nn.Linear(3, 4), nn.Embedding(9, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, scale = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + scale * torch.randn_like(scale))


NET = Variational()


@pytest.mark.parametrize(
    ("step", "into"),
    [
        (NET, "model"),
        (lambda x: F.dropout(NET.encoder(F.dropout(x, 0.2)), 0.2), "model"),
        (lambda x: F.dropout1d(NET.encoder(x)[None], 0.2), "model"),
        (lambda x: NET.encoder(x) * x.new_empty(len(x), 1).bernoulli_(0.9).div_(0.9), "model"),
        (lambda x: NET.encoder(x + 0.1 * torch.randn_like(x)), "data"),
        (lambda x: NET.encoder(x + 0.1 * torch.randn(4)), "data"),
        (lambda x: NET.times(torch.randint(0, 9, (8,))), "data"),
        (lambda x: NET.encoder(torch.randn(8, 4)), "data"),
        (lambda x: NET.encoder(x[torch.randperm(8)]), "data"),
        (lambda x: NET.encoder(x.masked_fill(torch.rand(8, 1) < 0.5, 0.0)), "data"),
    ],
    ids=["vae", "dropout", "channels", "drop path", "noise", "one noise", "time steps", "latents", "mixup", "masked"],
)
def test_draws_are_followed_to_the_data_or_the_model(step: Callable[[torch.Tensor], torch.Tensor], into: str) -> None:
    tape, x = RandomReplay(), torch.rand(8, 4)
    tape.flow = DrawFlow()
    tape.flow.begin([x, torch.zeros(8)])
    with tape:
        step(x).sum().backward()
    assert {draw["into"] for draw in tape.flow.found()} == {into}


def test_numbers_of_numpy_and_python_are_counted() -> None:
    import random

    for count in (0, 1, 700, 3000):
        before = states_of_global()
        np.random.random_sample(count)
        for _ in range(count):
            random.getrandbits(32)
        expected = {"NumPy": 2 * count, "Python": count} if count else {}
        assert values_drawn(before, states_of_global()) == expected


def test_generators_keep_their_places() -> None:
    own, first = OwnGenerators(), np.random.default_rng(0)
    own.find()
    before = own.states()
    second = random.Random(1)
    own.find()
    assert any(generator is second for generator in own.known)
    assert drawn(before, own.states()) == {}
    first.random(3)
    assert list(drawn(before, own.states()).values()) == [3]


def test_generators_of_objects_are_seeded() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].rng, module.other = np.random.default_rng(1), torch.Generator()  # type: ignore[assignment]
    drawn = []
    for _ in range(2):
        seed_own(module, 5)
        drawn.append((module[0].rng.random(), torch.rand((), generator=module.other).item()))  # type: ignore[union-attr, operator, call-overload]
    assert drawn[0] == drawn[1]


# Resumed training.


def trained(weights: str, begun: dict[str, str], gradient: float, digest: str, *, first: int) -> RankRecord:
    steps = [event("step", first, names={"0:0": "w"}, lr=[0.1], optimizer=0)]
    steps = [event("step", 0, names={"0:0": "w"}, lr=[0.1], optimizer=0)] * first + steps
    batch = event(
        "batch", trains=True, loader=0, iteration=0, indices=[1], samples=["s"], draw_digest=digest, at_step={}
    )
    tensors = {f"before/{first}/0:0": torch.ones(2), f"applied/{first}/0:0": torch.full((2,), gradient)}
    state = event("state", values={"weights w": weights})
    return RankRecord(0, [*steps, batch, event("begin", values=begun), state], tensors)


@pytest.mark.parametrize(
    ("begun", "digest", "expected", "said"),
    [
        ({"attribute teacher 0.weight": "other"}, "draws", "fault", "the attribute teacher"),
        ({"attribute center": "other"}, "draws", "fault", "the attribute center"),
        ({}, "other draws", "cannot tell", "draws other random numbers"),
        ({}, "draws", "cannot tell", "no state is seen"),
    ],
)
def test_a_resumed_training_lost_a_state_only_if_it_has_a_name(
    begun: dict[str, str], digest: str, expected: str, said: str
) -> None:
    known = {"attribute teacher 0.weight": "a", "attribute center": "a"}
    whole = [trained("end", known, 1.0, "draws", first=1)]
    saved = records([event("step", names={}, lr=[0.1])])
    resumed = [trained("another end", known | begun, 2.0, digest, first=0)]
    given = evidence(whole=whole, save=saved, resume=resumed, ranks=whole)
    (finding,) = load_checks()["LD025"].check(given)
    assert (finding.verdict.value, said in finding.message) == (expected, True), finding


# Stages that fail.


def test_a_prediction_that_fails_on_several_ranks_is_shown() -> None:
    epoch = event("end", reached_end=True, predicts=True, failures=[], libraries=[])
    given = evidence(
        Recorded(predict1=records([epoch]), predict2=failed("TypeError", "no batch_size")), single=records([epoch])
    )
    outcome, stacks = compare_evaluation(given)
    assert "TypeError: no batch_size" in outcome
    assert "no batch_size" in stacks
    (finding,) = load_checks()["LD030"].check(given)
    assert (finding.verdict.value, "TypeError: no batch_size" in finding.message) == ("cannot tell", True)


@pytest.mark.parametrize("works", [True, False])
def test_code_that_fails_on_one_process_is_run_on_several(works: bool, tmp_path: Path) -> None:
    end = event("end", reached_end=True, failures=[], libraries=[])
    several = records([event("epoch", trains=False), end], [event("epoch", trains=False), end])
    wrong = failed("ValueError", "devices=2 does not match the world size 1")
    runner = Recorded(train1=wrong, train2=several if works else [*wrong, *wrong])
    examination = _Examination(Evidence(SPEC, runner), {}, tmp_path)
    examination.run()
    report = examination.report("mine:main", 0.0, Protection(tmp_path, keep_output=False))
    assert report.exit_code == (0 if works else 2)
    assert "devices=2 does not match" in report.stages[0].outcome
    assert bool(report.error) is not works


def test_long_lists_of_an_event_are_written_as_tensors() -> None:
    epoch = event("epoch", indices=list(range(20_000)), sizes=[3], sampler=None)
    written = packed(epoch)
    assert isinstance(written["indices"], torch.Tensor)
    assert written["sizes"] == [3]
    assert unpacked(written) == epoch


def test_nothing_is_said_of_modules_whose_outputs_are_not_known() -> None:
    def record(number: int, rows: int, *names: str) -> RankRecord:
        tensors = {f"out/{place}": torch.ones(rows, 2) * (1 + place * number) for place in range(len(names))}
        tensors |= {f"{kind}/0/0:0": torch.tensor([1.0, number]) for kind in ("applied", "local")}
        outputs = [event("output", number=place, name=name, module="Linear") for place, name in enumerate(names)]
        return RankRecord(0, [event("step", names={"0:0": "w"}, lr=[0.1]), *outputs], tensors)

    ranks = Run(SPEC, Path(), [record(number, 2, "first", "second") for number in range(2)])
    for names, module, seen in ((("first", "second"), "second", True), (("second",), "second", False)):
        found = compare_records(ranks, record(4, 4, *names), threshold=1e-6)
        assert (found.module, found.modules_seen) == (module, seen)
    unknown = evidence(ranks=records([], []))
    unknown.reference = RankComparison(0.5, weights=(0.5, 0.4), residual=0.1, differences=(0.5,), modules_seen=False)
    assert [verdicts(code, unknown) for code in ("LD012", "LD015")] == [["cannot tell"], ["cannot tell"]]


def test_a_loss_that_only_the_ranks_return_is_no_unknown_output() -> None:
    def record(number: int, rows: int, *, wrapped: bool, kept: bool) -> RankRecord:
        tensors = {f"{kind}/0/0:0": torch.tensor([1.0, number]) for kind in ("applied", "local")}
        outputs = [event("output", number=place, name=name, module="Linear") for place, name in enumerate(("net", ""))]
        tensors |= {"out/0": torch.ones(rows, 2), "out/1": torch.tensor(0.5)} if kept else {}
        return RankRecord(0, [event("step", names={"0:0": "w"}, lr=[0.1]), *outputs[: 1 + wrapped]], tensors)

    # Of micro-batches, the events are kept without their tensors.
    for kept in (True, False):
        ranks = Run(SPEC, Path(), [record(number, 2, wrapped=True, kept=kept) for number in range(2)])
        found = compare_records(ranks, record(4, 4, wrapped=False, kept=kept), threshold=1e-6)
        assert (found.module, found.modules_seen) == ("", True)


def test_a_large_network_is_compared_in_the_steps_that_all_recorded() -> None:
    gradients = {f"{kind}/{step}/0:0": torch.ones(3) for kind in ("applied", "local") for step in range(2)}
    first = {name: tensor for name, tensor in gradients.items() if "/0/" in name}
    steps = [event("step", names={"0:0": "w"}, lr=[0.1]) for _ in range(2)]
    ranks = Run(SPEC, Path(), [RankRecord(rank, steps, first) for rank in range(2)])
    found = compare_records(ranks, RankRecord(0, steps, gradients), threshold=1e-6)
    assert (found.cannot, found.differences) == ("", (0.0,))


@pytest.mark.parametrize(
    ("weights", "expected"), [((0.6, 0.4), ["fault"]), ((0.5002, 0.4998), ["note"]), ((0.5, 0.5), [])]
)
def test_nearly_equal_counts_are_a_note(weights: tuple[float, float], expected: list[str]) -> None:
    given = evidence(ranks=records([], []))
    difference = weights[0] - weights[1] + 1e-5
    given.reference = RankComparison(difference, weights=weights, residual=1e-15, differences=(difference,))
    given.compare = lambda *_, **__: RankComparison(differences=(1e-15,))  # type: ignore[method-assign]
    assert verdicts("LD013", given) == expected


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_that_overflow_have_no_weights(value: float) -> None:
    gradients = {f"{kind}/0/0:0": torch.tensor([1.0, value]) for kind in ("applied", "local")}
    steps = [event("step", names={"0:0": "w"}, lr=[0.1])]
    ranks = Run(SPEC, Path(), [RankRecord(rank, steps, gradients) for rank in range(2)])
    found = compare_records(ranks, RankRecord(0, steps, gradients), threshold=1e-6)
    assert (found.cannot, found.weights, found.residual) == ("", (), 0.0)


# Failed runs.


def failing(rank: int, kind: str, message: str) -> RankRecord:
    trace = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n    step()\n    ^^^^^^\n'
        f'  File "{PACKAGE}/probes/wrap.py", line 39, in call\n    return around(original)\n           ^^^^^^\n'
        f'  File "torch/nn.py", line 1, in forward\n    raise\n{kind}: {message}'
    )
    return RankRecord(rank, [event("error", type=kind, message=message, trace=trace, input=False)], {})


def test_the_rank_that_failed_first_is_named_before_those_that_lost_it() -> None:
    lost = failing(0, "RuntimeError", "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:55948")
    run = Run(SPEC, Path(), [lost, failing(1, "ValueError", "bad sample 17")])
    assert run.short_reason == "rank 1: ValueError: bad sample 17"
    assert run.reason.endswith("ValueError: bad sample 17")
    assert run.stacks.index("Rank 1 failed") < run.stacks.index("Rank 0 failed")
    assert PACKAGE not in run.reason
    assert [line.split()[1] for line in run.reason.splitlines() if line.startswith("  File")] == [
        '"train.py",',
        '"torch/nn.py",',
    ]


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        ("Error initializing torch.distributed: environment variable RANK expected, but not set", True),
        ("no file", False),
    ],
)
def test_a_program_that_needs_a_launcher_is_known(message: str, needed: bool) -> None:
    assert Run(SPEC, Path(), [failing(0, "ValueError", message)]).needs_launcher is needed
    assert not Run(SPEC, Path(), [failing(0, "ValueError", message)]).ended_early
    assert Run(SPEC, Path(), [RankRecord(0, code=0)]).ended_early
    assert not Run(SPEC, Path(), [RankRecord(0, code=1)]).ended_early


@pytest.mark.parametrize(("rates", "said"), [((0.02, 0.01), "rank 0 0.02, rank 1 0.01"), ((0.02, 0.02), "")])
def test_a_learning_rate_that_differs_late_is_named(rates: tuple[float, float], said: str) -> None:
    steps = [
        [*(event("step", step=step, lr=[0.1, 0.02] if step < 24 else [0.1, rate]) for step in range(30)), event("end")]
        for rate in rates
    ]
    told = ld036_unexplained_difference._rates(evidence(**{"many steps": records(*steps)}), 24)
    assert said in told
    assert bool(told) == bool(said)
    assert ld036_unexplained_difference._rates(evidence(), 24) == ""
