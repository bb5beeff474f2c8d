"""Programs that start their ranks, and make their batches, in many ways are compared with one process."""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from compared_command import compared
from doctor_support import CHILD_ENV
from mutations import MUTATIONS
from projects.cases import cases

import ddp_doctor
from ddp_doctor.errors import InputError
from ddp_doctor.evidence.first_runs import FirstRuns
from ddp_doctor.evidence.micro_batches import _common_factor, _why_other_losses, compare_micro_batches, missing_turns
from ddp_doctor.evidence.rank_comparison import BATCHES, MICRO_BATCHES, THRESHOLD
from ddp_doctor.launch.rank import is_launcher
from ddp_doctor.launch.world_constants import change, changed_arguments, write_locals
from ddp_doctor.probes.generators import generators
from ddp_doctor.probes.micro_batches import Turn, turns, weights_at
from ddp_doctor.records.run import RankRecord, Run
from ddp_doctor.records.spec import Spec, Target

WAYS = Path(__file__).with_name("ways")
_TORCHRUN = ["torchrun", "--nproc_per_node=2"]
STARTS = {
    "torchrun": [*_TORCHRUN, "torchrun_loop.py"],
    "torchrun as a module": ["python", "-m", "torch.distributed.run", *_TORCHRUN[1:], "torchrun_loop.py"],
    "a rank per GPU": ["python", "spawned.py", "--start", "gpus"],
    "an argument of its own": ["python", "spawned.py", "--world-size", "2"],
    "a constant": ["python", "spawned.py", "--start", "fixed", "--by-hand"],
    "forked by hand": ["python", "processes.py"],
    "spawned by hand": ["python", "processes.py", "spawn"],
    "a script that starts itself": ["python", "launched_by_script.py"],
    "a shell script": ["bash", "by_hand.sh"],
    "Trainer(devices=2)": ["python", "trainer.py"],
    "torchrun and Trainer(devices=2)": [*_TORCHRUN, "trainer.py"],
    "LightningCLI": ["python", "cli.py", "fit", "--trainer.devices=2", "--config=cli.yaml"],
    "Fabric": ["python", "fabric_loop.py"],
    "fabric run": ["fabric", "run", "--accelerator=cpu", "--devices=2", "fabric_loop.py"],
    "accelerate launch": ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "accelerate_script.py"],
    "accelerate from a notebook": ["python", "accelerate_script.py", "notebook"],
    "an override of hydra": ["python", "hydra_app.py", "trainer.devices=2"],
    "HF Trainer": [*_TORCHRUN, "hf_trainer.py"],
}
PROGRAMS = {case.name: case.text for case in cases("batching.txt")}
HEALTHY = STARTS | {name: [*_TORCHRUN, f"{name}.py"] for name in PROGRAMS}
# One process gets the batches of the ranks in turn; in the others, it gets their joined batch.
IN_TURN = {"token_batches", "sliced_by_rank", "stream", "own_sampler", "counted_tokens"}
LOSS_TIMES_RANKS = next(mutation for mutation in MUTATIONS if mutation.name == "loss times the ranks")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(WAYS, tmp_path, dirs_exist_ok=True)
    for name, text in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [name for name in HEALTHY if name != "loaded_in_32_bits"])
def test_a_healthy_program_equals_one_process(name: str) -> None:
    if "hydra" in name:
        pytest.importorskip("hydra")
    found, _ = compared(HEALTHY[name])
    assert not found.cannot
    assert found.difference < 1e-9
    assert found.method == (MICRO_BATCHES if name in IN_TURN else BATCHES)
    assert len(found.differences) > 1


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["a constant", "spawned by hand", "Trainer(devices=2)", *IN_TURN, "gan"])
def test_a_wrong_scale_is_found(name: str) -> None:
    for path in Path().glob("*.py"):
        path.write_text(LOSS_TIMES_RANKS.apply(path.read_text()))
    found, _ = compared(HEALTHY[name])
    assert found.difference == pytest.approx(1.0)
    assert found.weights == pytest.approx((0.25, 0.25), rel=1e-6)
    assert found.applied[0][0] == pytest.approx((0.5, 0.5), rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ranks_that_a_program_forks_are_compared() -> None:
    found, runs = compared(["python", "processes.py"])
    assert [len(run.ranks) for run in runs.values()] == [2, 1]
    assert found.difference < 1e-9
    assert found.method == BATCHES


@pytest.mark.parametrize(
    ("function", "given", "factor"),
    # The sum of the counts of all ranks, their mean, and numbers that are no divisors or that differ.
    [("div", (30.0, 30.0), 2.0), ("div", (15.0, 15.0), 1.0), ("mul", (30.0, 30.0), 0.0), ("div", (30.0, 20.0), 0.0)],
)
def test_a_count_of_all_ranks_changes_the_loss_of_one_process(
    function: str, given: tuple[float, float], factor: float
) -> None:
    plan = [Turn(step, rank, step) for step in range(2) for rank in range(2)]
    numbers = [
        {"kind": "number", "function": function, "own": own, "given": given[turn.step], "turn": list(turn)}
        for turn, own in zip(plan, (10.0, 20.0, 18.0, 12.0), strict=True)
    ]
    assert _common_factor(RankRecord(0, numbers), plan, 2) == factor
    assert _common_factor(RankRecord(0), plan, 2) == 1.0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_weights_that_were_loaded_in_32_bits_are_compared_in_64() -> None:
    found, _ = compared(HEALTHY["loaded_in_32_bits"])
    assert found.difference < 1e-9
    # What a scaler divides is divided on one process as well, and is no wrong scale.
    assert found.applied[0][0] == pytest.approx((0.5 / 4096, 0.5 / 4096))
    assert found.reference[0] == pytest.approx(found.applied[0][0])


def test_one_process_gets_the_micro_batches_of_the_ranks_in_turn() -> None:
    once = turns([[0, 1], [0, 1]], [0, 0])
    assert once == [Turn(0, 0, 0), Turn(0, 1, 0), Turn(1, 0, 1), Turn(1, 1, 1)]
    two_optimizers = turns([[0, 1, 2, 3], [0, 1, 2, 3]], [0, 1, 0, 1])
    assert [(turn.rank, turn.step) for turn in two_optimizers[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_weights_before_a_step_are_the_newest_of_each_optimizer() -> None:
    names = ["before/0/0:0", "after/0/0:0", "before/1/1:0", "after/1/1:0", "before/2/0:0", "after/2/0:0"]
    tensors = {name: torch.tensor(float(number)) for number, name in enumerate(names)}
    assert {key: float(value) for key, value in weights_at(tensors, 1).items()} == {"0:0": 1.0, "1:0": 2.0}
    assert {key: float(value) for key, value in weights_at(tensors, 0).items()} == {"0:0": 0.0, "1:0": 2.0}


@pytest.mark.parametrize(
    ("losses", "said"),
    [((1.0, 3.0), ""), ((2.0, 6.0), ""), ((1.0, 4.0), "not those of the ranks"), ((None, None), "not known")],
    ids=["equal", "one factor", "other inputs", "no number"],
)
def test_gradients_are_compared_only_if_the_losses_are_those_of_the_ranks(losses: Any, said: str) -> None:
    def record(values: Any, *steps: list[int]) -> RankRecord:
        passes = [
            {"kind": "backward", "step": 0 if len(values) == 1 else place, "loss": value}
            for place, value in enumerate(values)
        ]
        taken = [{"kind": "step", "optimizer": 0, "lr": [0.1], "names": {"0:0": "w"}, "passes": own} for own in steps]
        tensors = {
            f"{kind}/{place}/0:0": torch.ones(3, dtype=torch.float64)
            for place in range(len(steps))
            for kind in ("applied", "local")
        }
        return RankRecord(0, [*passes, *taken, {"kind": "end", "failures": []}], tensors)

    spec = Spec(Target(command=("x",)))
    ranks = Run(spec, Path(), [record([1.0], [0]), record([3.0], [0])])
    whole = [Run(spec, Path(), [record(losses, [0], [1])])]
    short = [Run(spec, Path(), [record([loss], [0])]) for loss in losses]
    assert (missing_turns(ranks, whole), missing_turns(ranks, short[:1]), missing_turns(ranks, short)) == (0, 1, 0)
    for references in (whole, short):
        found = compare_micro_batches(ranks, references, threshold=THRESHOLD)
        assert said in found.cannot
        assert bool(found.cannot) == bool(said)


@pytest.mark.parametrize(("kept", "compared_steps"), [(1, 2), (3, 4)])
def test_losses_are_compared_as_long_as_the_weights_of_the_ranks_are_known(kept: int, compared_steps: int) -> None:
    """Those of a large model are recorded in the first step alone."""

    def losses(values: list[float], kept: int = 0) -> RankRecord:
        passes = [{"kind": "backward", "step": step, "loss": value} for step, value in enumerate(values)]
        return RankRecord(0, passes, {f"after/{step}/0:0": torch.ones(1) for step in range(kept)})

    ranks = Run(Spec(Target(command=("x",))), Path(), [losses([1.0, 2.0, 3.0, 4.0, 5.0], kept)])
    plan = [Turn(step, 0, step) for step in range(5)]
    for other in range(5):
        one = losses([value + (step == other) for step, value in enumerate((1.0, 2.0, 3.0, 4.0, 5.0))])
        assert bool(_why_other_losses(ranks, one, plan, THRESHOLD)) == (other < compared_steps)


def test_a_program_that_starts_another_number_of_ranks_is_named() -> None:
    begun = {"kind": "init_process_group", "world": 4}
    run = Run(Spec(Target(command=("x",))), Path(), [RankRecord(0, [begun])])
    assert not run.worked
    assert run.short_reason == "the program starts 4 ranks, although the doctor runs 1"


@pytest.mark.parametrize(
    ("hung", "kinds", "named"),
    [(True, ("step",), True), (True, ("epoch",), False), (True, ("init_process_group", "step"), False)],
    ids=["trained", "waited before it trained", "joined"],
)
def test_a_process_that_trains_alone_is_named(hung: bool, kinds: Sequence[str], named: bool) -> None:
    """The other rank was never started, and the doctor has waited for it."""
    events = [{"kind": kind, "step": 0} for kind in kinds]
    run = Run(Spec(Target(command=("x",))), Path(), [RankRecord(0, events), RankRecord(1)], hung=hung)
    first = FirstRuns(SimpleNamespace(run=lambda _: run, spec=run.spec), lambda *_: None)
    if named:
        with pytest.raises(InputError, match="joined no process group"):
            first._several()
    else:
        assert first._several() == "a rank hung"


def test_numbers_that_are_the_number_of_ranks_are_changed() -> None:
    options = argparse.Namespace(world_size=2, batch_size=2, num_workers=2, train={"n_gpus": 2, "layers": 2})
    held = SimpleNamespace(world_size=2)
    change({"options": options, "held": held}, 2, 1)
    assert vars(options) == {"world_size": 1, "batch_size": 2, "num_workers": 2, "train": {"n_gpus": 1, "layers": 2}}
    assert held.world_size == 2

    def worker(rank: int, world_size: int, epochs: int) -> None: ...

    assert changed_arguments(worker, (2, 2), 2, 1) == (1, 2)


def test_a_local_variable_of_a_running_function_is_changed() -> None:
    def change() -> None:
        frame = sys._getframe(1)
        frame.f_locals["world"] = 1
        write_locals(frame)

    world = 2
    change()
    assert world == 1


@pytest.mark.parametrize(
    ("words", "launches"),
    [
        ("python /env/bin/torchrun --nproc-per-node 2 train.py", True),
        ("python -u -m torch.distributed.run train.py", True),
        ("python /env/bin/accelerate launch train.py", True),
        ("python -u train.py torchrun", False),
        ("python -m train -m torch.distributed.run", False),
        ("python -c pass --multiprocessing-fork", False),
        ("python /env/bin/torchrun --multiprocessing-fork", False),
        ("python", False),
    ],
)
def test_a_launcher_is_known_by_how_it_was_started(words: str, launches: bool) -> None:
    assert is_launcher(words.split()) == launches


def test_a_draw_changes_the_state_of_its_generator_alone() -> None:
    draws = {"torch": lambda: torch.rand(1), "NumPy": np.random.rand, "Python": random.random}
    for name, draw in draws.items():
        before = generators()
        draw()
        assert {one for one, state in generators().items() if state != before[one]} == {name}


def test_probes_are_installed_although_a_package_looked_for_torch_before(tmp_path: Path):
    Spec(Target(), world_size=1).write(tmp_path)
    looks = "import importlib.util; importlib.util.find_spec('torch'); import torch"
    site = Path(ddp_doctor.__file__).parent / "launch" / "site"
    environment = CHILD_ENV | {"DDP_DOCTOR_RUN": str(tmp_path)}
    environment["PYTHONPATH"] = f"{site}:{CHILD_ENV['PYTHONPATH']}"
    subprocess.run([sys.executable, "-c", looks], env=environment, check=True, timeout=60)
    # The probes register where the stacks are written.
    assert list(tmp_path.glob("stack-*.txt"))
