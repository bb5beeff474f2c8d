"""Failures inside a rank: an exception, a rank that hangs or is late, a loss that is NaN."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, result_of
from processes import forked, ranks_of, wait_for

from faults.conftest import SMALL, RecordMetric, read_errors, read_step, wait_for_exit
from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.checkpoint.store import CheckpointFolder, find_newest_valid
from lit_mnist.cli.main import main
from lit_mnist.data.loader import EvaluationBatches, TrainBatches
from lit_mnist.distributed import heartbeat
from lit_mnist.distributed.sample_order import train_indices
from lit_mnist.engines import raw_ddp, single
from lit_mnist.plugins.batch_norm import PortableSyncBatchNorm
from lit_mnist.run import finite

WORDS = (*SMALL, "--devices", 2, "--epochs", 3, "--save-every", 4)


class PlantedError(Exception):
    """The error that the tests raise."""


def fail_at(place: str, rank: int, note: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one rank raise an error at a place, and record the time."""

    def fail() -> None:
        if os.environ.get("RANK") == str(rank):
            note.write_text(str(time.time()))
            raise PlantedError(place)

    if place == "loader":
        select = TrainBatches._select

        def failing_select(self: TrainBatches, batches: range) -> Any:
            if self.epoch == 1 and 7 in batches:
                fail()
            return select(self, batches)

        monkeypatch.setattr(TrainBatches, "_select", failing_select)
    elif place == "validation":
        batches = EvaluationBatches.__iter__

        def failing_batches(self: EvaluationBatches) -> Iterator[Any]:
            fail()
            yield from batches(self)

        monkeypatch.setattr(EvaluationBatches, "__iter__", failing_batches)
    elif place == "save":
        put = CheckpointFolder.put

        def failing_put(self: CheckpointFolder, write: Any, step: int, *, is_best: bool) -> None:
            if step > 20:
                fail()
            put(self, write, step, is_best=is_best)

        monkeypatch.setattr(CheckpointFolder, "put", failing_put)


@pytest.mark.parametrize("engine", ["lightning", pytest.param("raw_ddp", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("place", "rank"), [("step", 1), ("validation", 1), ("loader", 0), ("save", 0)])
def test_an_exception_in_one_rank_ends_all_with_its_own_traceback(
    program: Program, monkeypatch: pytest.MonkeyPatch, record_metric: RecordMetric, engine: str, place: str, rank: int
) -> None:
    note = program.folder / "raised"
    fail_at(place, rank, note, monkeypatch)
    extra = ("--inject", f"raise:rank={rank},step=27") if place == "step" else ()
    done = program(*WORDS, *extra, "--run-dir", program.folder / "run", engine=engine)
    ended = time.time()
    assert done.code == 3, done.err
    assert re.search(rf"error: Rank {rank} \(process \d+ on \S+\) failed in step \d+:\nTraceback", done.err), done.err
    *_, last = [line for line in done.err.splitlines() if not line.startswith("The") and line]
    assert "InjectedError" in last if place == "step" else last.endswith(f"PlantedError: {place}"), done.err
    assert "onnection" not in done.err
    if note.exists():
        seconds = ended - float(note.read_text())
        assert seconds < 5
        record_metric(
            f"an exception in a rank's {place}, {engine}", f"all ended after {seconds:.1f} s, its own traceback last"
        )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_exits_slowly_reports_its_error_before_the_others_fail(
    program: Program, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    revert = PortableSyncBatchNorm.revert

    def slow_revert(self: PortableSyncBatchNorm, model: torch.nn.Module) -> torch.nn.Module:
        reverted = revert(self, model)
        time.sleep(0.5)
        return reverted

    monkeypatch.setattr(PortableSyncBatchNorm, "revert", slow_revert)
    done = program(*WORDS, "--inject", f"raise:rank={rank},step=27", "--run-dir", program.folder / "run")
    assert done.code == 3, done.err
    assert re.search(rf"error: Rank {rank} \(process \d+ on \S+\) failed in step 27:\nTraceback", done.err), done.err


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "victim"), [("lightning", 1), ("raw_ddp", 0)])
def test_a_stopped_rank_is_named_and_ends_the_run_at_the_timeout(
    program: Program, record_metric: RecordMetric, engine: str, victim: int
) -> None:
    folder = program.folder / "run"
    with program.started(
        *SMALL, "--devices", 2, "--epochs", 50, "--run.timeout", 14, "--run-dir", folder, engine=engine
    ) as group:
        wait_for(lambda: read_step(folder) > 5, 60, program.folder)
        # Until its first heartbeat.
        time.sleep(1.5)
        os.kill(ranks_of(group)[victim], signal.SIGSTOP)
        began = time.monotonic()
        wait_for(lambda: "warning" in read_errors(program), 14, program.folder)
        warned = time.monotonic() - began
        code, _ = wait_for_exit(group, program, 20)
        ended = time.monotonic() - began
    told = read_errors(program)
    assert re.search(rf"warning: Rank {victim} \(process \d+ on \S+\) has sent no heartbeat for 1\d s", told), told
    assert code == 3
    assert f"error: Rank {1 - victim} " in told
    if victim:
        assert re.search(rf"does not respond\. Rank {victim} \(.*\) has sent no heartbeat", told), told
    record_metric(
        "SIGSTOP of a rank", f"named after {warned:.0f} s, run ended after {ended:.0f} s with a timeout of 14 s"
    )


@pytest.mark.slow
def test_a_rank_that_is_late_is_named(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 reads slowly for a while: rank 1 warns on the terminal, and the run continues."""
    select = TrainBatches._select

    def late(self: TrainBatches, batches: range) -> Any:
        if os.environ["RANK"] == "0" and self.epoch == 0 and 5 in batches:
            time.sleep(5.5)
        return select(self, batches)

    monkeypatch.setattr(TrainBatches, "_select", late)
    monkeypatch.setattr(heartbeat, "_SECONDS_UNTIL_LATE", 3.0)
    # Long enough for another heartbeat after the pause.
    done = program(*SMALL, "--devices", 2, "--epochs", 8, "--run-dir", program.folder / "run", engine="raw_ddp")
    assert done.code == 0, done.err
    assert re.search(r"warning: Rank 0 \(.*\) is late: it has been in step \d for \d s\.", done.err), done.err
    assert "warning: Rank 0 continues." in done.err


@pytest.fixture
def looking_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients are checked together after several steps, as on a GPU."""
    monkeypatch.setattr(finite, "SYNCHRONOUS_DEVICES", frozenset())


FLOAT16 = ("--precision", "16-mixed")
ACCUMULATION = ("--trainer.accumulate_grad_batches", 3)
NAN_CASES = [
    pytest.param("lightning", 2, 1, (), id="lightning"),
    pytest.param("raw_ddp", 2, 1, ACCUMULATION, id="accumulation"),
    pytest.param("raw_ddp", 2, 1, FLOAT16, id="float16"),
    pytest.param(
        "lightning", 2, 1, (*FLOAT16, "--model.net", "basicnet"), id="lightning-float16", marks=pytest.mark.slow
    ),
    pytest.param("single", 1, 1, (), id="single"),
    pytest.param("lightning", 1, 1, ("--trainer.gradient_clip_val", 1.0), id="lightning-alone"),
]


@pytest.mark.parametrize(("engine", "devices", "every", "flags"), NAN_CASES)
def test_a_nan_loss_stops_all_ranks_and_names_its_samples(
    program: Program, engine: str, devices: int, every: int, flags: tuple[object, ...]
) -> None:
    nan_is_named(program, engine, devices, every, flags)


@pytest.mark.usefixtures("looking_late")
@pytest.mark.parametrize(
    ("engine", "devices", "every", "flags"),
    [
        pytest.param("lightning", 2, 1, (), id="before the save after its step"),
        pytest.param("raw_ddp", 2, 3, FLOAT16, id="before the next save, float16"),
        pytest.param("lightning", 2, 3, FLOAT16, id="lightning, float16", marks=pytest.mark.slow),
        pytest.param("raw_ddp", 2, 5, ACCUMULATION, id="with the metrics of a short epoch, accumulation"),
        pytest.param("lightning", 2, 50, (), id="before the evaluation"),
        pytest.param("single", 1, 50, (), id="single", marks=pytest.mark.slow),
    ],
)
def test_the_step_is_named_if_several_steps_are_checked_together(
    program: Program, engine: str, devices: int, every: int, flags: tuple[object, ...]
) -> None:
    """The message has the first such step, although the weights of later steps are NaN, too. None of them is saved."""
    nan_is_named(program, engine, devices, every, flags)


def nan_is_named(program: Program, engine: str, devices: int, every: int, flags: tuple[object, ...]) -> None:
    """Trains to a NaN loss in step 6 of the last rank, and checks the message and the checkpoints."""
    folder, rank, step = program.folder / "run", devices - 1, 6
    words = (*SMALL, "--devices", devices, "--save-every", every, *flags, "--run-dir", folder)
    done = program(*words, "--inject", f"nan:rank={rank},step={step}", "--max-restarts", devices - 1, engine=engine)
    assert done.code == 4, done.out + done.err
    log = folder / "logs" / "rank-0.log"
    first = done.err.splitlines()[0]
    assert first == (
        f"error: The loss was nan in step {step} on rank {rank}: lower --lr, or look at its samples, which "
        f"{log.relative_to(program.folder)} lists."
    ), done.err
    logs = [path.read_text() for path in sorted(log.parent.glob("rank-*.log"))]
    assert len(logs) == devices
    named = [re.findall(rf"The samples of step {step} on rank {rank} are ([\d, ]+)\.", text) for text in logs]
    assert all(len(each) == 1 for each in named), logs
    (told,) = {each[0] for each in named}
    assert "Restarting" not in done.err
    accumulate = 3 if "--trainer.accumulate_grad_batches" in flags else 1
    share = 36 // devices
    expected: list[int] = []
    for batch in range((step - 1) * accumulate, step * accumulate):
        whole = train_indices(42, 0, batch, count=720, batch_size=36)
        expected += whole[rank * share : (rank + 1) * share].tolist()
    assert list(map(int, told.split(", "))) == expected
    saved = find_newest_valid(folder, pytest.fail)
    if every >= step:
        assert saved is None
        return
    assert saved is not None
    checkpoint = read_checkpoint(saved.path)
    assert checkpoint["global_step"] == (step - 1) // every * every
    assert all(bool(torch.isfinite(weight).all()) for weight in checkpoint["state_dict"].values())


@pytest.mark.parametrize("late", [False, True])
def test_a_gradient_that_is_not_finite_stops_all_ranks(
    program: Program, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, late: bool
) -> None:
    """The loss is finite, but its gradient is not. The message has no rank, since the ranks share the gradient."""

    class Hurt(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
            return logits.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0] * torch.inf

    if late:
        request.getfixturevalue("looking_late")
    original, steps = raw_ddp.mean_loss, []

    def hurt(logits: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        steps.append(1)
        bad = os.environ["RANK"] == "1" and len(steps) == 4
        return original(Hurt.apply(logits) if bad else logits, *arguments, **named)

    monkeypatch.setattr(raw_ddp, "mean_loss", hurt)
    folder = program.folder / "run"
    done = program(*SMALL, "--devices", 2, "--save-every", 1, "--run-dir", folder, engine="raw_ddp")
    assert done.code == 4, done.err
    log = folder / "logs" / "rank-0.log"
    assert done.err.splitlines()[0] == (
        "error: The gradient was not finite in step 4, though every rank's loss was: lower --lr, or look at its "
        f"samples, which {log.relative_to(program.folder)} lists."
    )
    assert re.search(r"The samples of step 4 on ranks 0, 1 are \d+(, \d+){35}\.", log.read_text())
    saved = find_newest_valid(folder, pytest.fail)
    assert saved is not None
    assert read_checkpoint(saved.path)["global_step"] == 3


def test_weights_that_are_not_finite_are_never_saved(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradient are finite, but the step overflows."""

    class Overflowing(torch.optim.SGD):
        steps = 0

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.steps += 1
            if self.steps == 3:
                self.param_groups[0]["params"][0].data.fill_(torch.inf)

    monkeypatch.setattr(single, "make_optimizer", lambda net, *_: Overflowing(net.parameters(), lr=0.01))
    folder = program.folder / "run"
    done = program(*SMALL, "--save-every", 1, "--run-dir", folder, engine="single")
    assert done.code == 4, done.out + done.err
    assert "A weight was not finite after step 3, which is not saved: lower --lr." in done.err
    saved = find_newest_valid(folder, pytest.fail)
    assert saved is not None
    assert read_checkpoint(saved.path)["global_step"] == 2


def test_two_runs_never_share_a_folder(program: Program) -> None:
    folder = program.folder / "run"
    with program.started(*SMALL, "--epochs", 50, "--devices", 2, "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 1, 60, program.folder)
        other = Program(program.folder / "other")
        other.folder.mkdir()
        done = other(*SMALL, "--run-dir", folder)
    assert done.code == 2
    assert f"in use by process {group} on" in done.err


def at_once(program: Program, count: int) -> None:
    words = [str(word) for word in (*SMALL, "--devices", 2, "--max-steps", 2)]

    def work() -> int:
        os.chdir(program.folder)
        return main(words)

    with ExitStack() as stack:
        outputs = [program.folder / f"output-{number}" for number in range(count)]
        for output in outputs:
            output.mkdir()
        groups = [stack.enter_context(forked(work, output)) for output in outputs]
        codes = [wait_for_exit(group, Program(output), 300)[0] for group, output in zip(groups, outputs, strict=True)]
    assert codes == [0] * count, [(output / "stderr.txt").read_text() for output in outputs]
    folders = list((program.folder / "runs").iterdir())
    assert len(folders) == count
    assert len({result_of(folder)["weights_sha256"] for folder in folders}) == 1


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_simultaneous_runs_do_not_interfere(program: Program, record_metric: RecordMetric, count: int) -> None:
    at_once(program, count)
    record_metric(
        "runs of two ranks started at once", f"{count}: no port conflict, folders of their own, bit-identical"
    )
