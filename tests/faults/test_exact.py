"""A run that is lost at any step and resumed ends with the same weights, optimizer state and metrics."""

from __future__ import annotations

import csv
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Program, largest_difference, result_of, weights_of
from torch import nn

from lit_mnist.checkpoint.digest import content_sha256
from lit_mnist.checkpoint.format import read_checkpoint
from lit_mnist.distributed.rank import Rank
from lit_mnist.plugins.exact_entry import KEY
from lit_mnist.plugins.plain_values import as_bytes, unpack
from lit_mnist.plugins.recording.checkpoint import RunCheckpointIO
from lit_mnist.run.monitor import StepMonitor
from lit_mnist.training.checkpoint_manager import CheckpointManager
from lit_mnist.training.job import ExperimentJob

# 20 steps in an epoch, of few samples: BasicNet in float16 and bfloat16 is slow on a CPU.
SMALL: tuple[object, ...] = (
    *("--data.train_size", 240, "--data.val_size", 50, "--data.test_size", 50),
    *("--batch-size", 12, "--lr", 0.01, "--run.threads", 1),
)
ENGINES = {"lightning": 2, "raw_ddp": 2, "single": 1}
# Three micro-batches to a step leave 7 steps in an epoch, the last of two micro-batches.
STEPS = {1: (27, 1, 13, 20), 3: (10, 1, 4, 7)}
QUICK = {
    ("raw_ddp", "basicnet", "32-true", 1, 13),
}
ALL = [
    (engine, net, precision, accumulate, step)
    for engine, net, precision, accumulate in itertools.product(
        ENGINES, ("convnet", "basicnet"), ("32-true", "bf16-mixed", "16-mixed"), (1, 3)
    )
    for step in STEPS[accumulate][:: 1 if precision == "32-true" else 2]
]


def words_of(engine: str, net: str, precision: str, accumulate: int) -> tuple[object, ...]:
    """Two epochs with augmentation, and for BasicNet with dropout."""
    model = ("--model.net", net, "--model.optimizer", "adamw" if net == "basicnet" else "sgd", "--precision", precision)
    data = ("--data.augment", "affine", "--trainer.accumulate_grad_batches", accumulate, "--devices", ENGINES[engine])
    return (*SMALL, *model, *data, "--epochs", 2)


def logged_metrics(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of `metrics.csv` without the columns that depend on the clock or on the logged steps."""
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    return [{name: value for name, value in row.items() if name != "images_per_s"} for row in rows]


def content_of(folder: Path) -> str:
    """Returns the digest of a whole checkpoint: weights, optimizer, schedule, scaler, loops, steps, experiment."""
    checkpoint = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    section = checkpoint.pop("lit_mnist")
    kept = {key: section[key] for key in ("precision", "threads", "data_sha256", "batch_size", "total_steps")}
    if entry := checkpoint.pop(KEY, None):
        state, *sums = [
            unpack(as_bytes(part), torch.device("cpu")) for part in (entry["state_is_step"], *entry["sums"])
        ]
        # As in `logged_metrics`: without the speed, and the mean of the losses since the last logged step.
        for metrics in (state["trainer"]["callback_metrics"], state["trainer"]["logged_metrics"]):
            metrics.pop("train_loss", None)
            metrics.pop("images_per_s", None)
        for each in sums:
            each["results"].pop("on_train_batch_end.images_per_s", None)
        kept |= {"state": state, "sums": sums}
    return content_sha256({**checkpoint, "section": kept})


def assert_same_run(folder: Path, whole: Path) -> None:
    """Asserts that a run has the result and the metrics of an uninterrupted run."""
    for key in ("weights_sha256", "steps", "skipped_steps", "epochs", "test", "validation"):
        assert result_of(folder)[key] == result_of(whole)[key], key
    assert content_of(folder) == content_of(whole)
    assert logged_metrics(folder) == logged_metrics(whole)


WHOLE: dict[tuple[Any, ...], Path] = {}


@pytest.mark.parametrize(
    ("engine", "net", "precision", "accumulate", "step"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL],
)
def test_a_run_lost_in_any_step_is_resumed_exactly(
    shared_program: Program, engine: str, net: str, precision: str, accumulate: int, step: int
) -> None:
    program, case = shared_program, (engine, net, precision, accumulate)
    words = words_of(*case)
    if case not in WHOLE:
        WHOLE[case] = program.train(*words, engine=engine)
    whole = WHOLE[case]
    folder = program.folder / f"lost-{'-'.join(map(str, case))}-{step}"
    fault = ("--save-every", 1, "--inject", f"kill:rank=0,step={step}", "--run-dir", folder)
    lost = program(*words, *fault, engine=engine)
    assert lost.code == (3 if ENGINES[engine] > 1 else -signal.SIGKILL), lost.err
    if step == 1:
        # Nothing was saved: a new run starts.
        assert not list((folder / "checkpoints").iterdir())
        return
    done = program("--resume", folder, engine=engine)
    assert done.code == 0, done.err
    assert_same_run(folder, whole)


# The optimizer step, and its micro-batch from 0, in which a run is lost: the first, a middle and the last step of each
# epoch, and of an accumulation window the first, the middle and the last micro-batch.
LOSSES = {
    1: ((1, 0), (10, 0), (20, 0), (21, 0), (30, 0), (40, 0)),
    3: ((1, 0), (4, 0), (4, 1), (4, 2), (7, 1), (8, 0), (11, 1), (14, 0), (14, 1)),
}


def lose(monkeypatch: pytest.MonkeyPatch, losses: tuple[tuple[int, int], ...], notes: Path) -> None:
    """Kills a run once at each of these places, every second time on rank 0.

    Each start is noted: the step it begins after, and the optimizer steps that were really made until then.
    """

    def planted(job: ExperimentJob, rank: Rank, net: nn.Module, step: int) -> None:
        plan = job.plan
        epoch, batch = plan.position(step)
        seen = epoch * plan.batches_per_epoch + batch
        places = {}
        for number, (lost, micro_batch) in enumerate(losses):
            epoch, first = plan.position(lost - 1)
            if rank.rank == number % plan.world_size:
                places[epoch * plan.batches_per_epoch + first + micro_batch] = notes / f"lost-{number}"
        if rank.is_first:
            made = read_checkpoint(job.folder / "checkpoints" / "last.ckpt")["steps_made"] if step else 0
            with (notes / "starts").open("a") as file:
                file.write(f"{step} {made}\n")

        def fail(*_: object) -> None:
            nonlocal seen
            if net.training:
                seen += 1
                if (note := places.get(seen - 1)) and not note.exists():
                    note.touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        net.register_forward_hook(fail)

    def begun(self: StepMonitor, **options: Any) -> None:
        begin(self, **options)
        planted(options["job"], options["rank"], options["net"], self.step)

    def at_once(write: Any) -> Any:
        def written(self: Any, *arguments: Any, **options: Any) -> None:
            write(self, *arguments, **options)
            self.wait()

        return written

    notes.mkdir()
    begin = StepMonitor.__init__
    monkeypatch.setattr(StepMonitor, "__init__", begun)
    # A checkpoint after every step, so that a run resumes directly before the step in which it was lost.
    monkeypatch.setattr(CheckpointManager, "write", at_once(CheckpointManager.write))
    monkeypatch.setattr(RunCheckpointIO, "save_checkpoint", at_once(RunCheckpointIO.save_checkpoint))


@pytest.mark.parametrize(
    ("engine", "precision", "accumulate"),
    [
        pytest.param("lightning", "16-mixed", 3, marks=pytest.mark.slow),
        pytest.param("raw_ddp", "16-mixed", 3, marks=pytest.mark.slow),
        pytest.param("single", "16-mixed", 1, marks=pytest.mark.slow),
        pytest.param("single", "16-mixed", 3, marks=pytest.mark.slow),
        pytest.param("lightning", "32-true", 1, marks=pytest.mark.slow),
        pytest.param("raw_ddp", "bf16-mixed", 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_lost_at_each_of_several_steps_is_bit_identical(
    program: Program, monkeypatch: pytest.MonkeyPatch, engine: str, precision: str, accumulate: int
) -> None:
    """The run restarts after each loss except the last, after which a command resumes it.

    In float16 the scale overflows at the start, and again whenever it has grown: steps are skipped before most losses
    and after them.
    """
    original = torch.amp.GradScaler.__init__

    def overflowing(self: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
        original(self, *args, **{**kwargs, "init_scale": 2.0**22, "growth_interval": 2})  # type: ignore[arg-type]

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", overflowing)
    words, losses = words_of(engine, "convnet", precision, accumulate), LOSSES[accumulate]
    whole = program.train(*words, engine=engine)
    notes, folder = program.folder / "notes", program.folder / "lost"
    lose(monkeypatch, losses, notes)
    lost = program(
        *words, "--save-every", 1, "--max-restarts", len(losses) - 1, "--run-dir", folder, engine=engine, timeout=200
    )
    assert lost.code == 3, lost.err
    done = program("--resume", folder, engine=engine)
    assert done.code == 0, done.err
    starts = [tuple(map(int, line.split())) for line in (notes / "starts").read_text().splitlines()]
    assert [step for step, _ in starts] == [0, *(step - 1 for step, _ in losses)]
    if precision == "16-mixed":
        skipped = [step - made for step, made in starts]
        assert 0 < skipped[2] < skipped[-1]
    assert_same_run(folder, whole)


@pytest.mark.parametrize(("before", "after"), [(1, 3), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_another_number_of_ranks_resumes_within_the_epoch(program: Program, before: int, after: int) -> None:
    """No sample is repeated or lost: in 64-bit precision the weights agree up to rounding."""
    words = (*SMALL, "--precision", "64-true", "--data.augment", "affine", "--epochs", 2)
    whole = weights_of(program.train(*words, "--devices", 1))
    folder = program.folder / "run"
    program(*words, "--devices", before, "--save-every", 1, "--inject", "kill:rank=0,step=9", "--run-dir", folder)
    done = program("--resume", folder, "--devices", after)
    assert done.code == 0, done.err
    assert result_of(folder)["world_size"] == after
    assert largest_difference(whole, weights_of(folder)) <= 1e-8


def test_a_checkpoint_that_cannot_be_resumed_is_rejected_with_both_names(program: Program) -> None:
    folder = program.folder / "run"
    program(*SMALL, "--save-every", 1, "--inject", "kill:rank=0,step=5", "--run-dir", folder)
    for flags, message in (
        (("--model.net", "basicnet"), ("basicnet", "convnet")),
        (("--data.name", "fashion_mnist"), ("fashion_mnist", "mnist")),
        (("--epochs", 3), ("60", "20")),
    ):
        done = program("--resume", folder, *flags)
        assert done.code == 2, done.out + done.err
        assert all(word in done.err for word in message), done.err
    done = program("--resume", folder)
    assert done.code == 0, done.err


@pytest.mark.parametrize("engine", ["single", "lightning"])
def test_a_single_rank_is_restarted(program: Program, engine: str) -> None:
    whole = program.train(*SMALL, engine=engine)
    folder = program.folder / "run"
    words = (*SMALL, "--save-every", 1, "--max-restarts", 1, "--run-dir", folder)
    done = program(*words, "--inject", "kill:rank=0,step=9", engine=engine)
    assert done.code == 0, done.err
    assert "was killed by SIGKILL in step 9." in done.err
    assert result_of(folder)["weights_sha256"] == result_of(whole)["weights_sha256"]


def test_a_scheduler_does_not_repeat_a_complete_run(program: Program) -> None:
    """`--resume auto` starts a new run, resumes an interrupted one, and says when a run is complete."""
    words = (*SMALL, "--devices", 2, "--resume", "auto", "--save-every", 1, "--run-dir", program.folder / "run")
    lost = program(*words, "--inject", "kill:rank=1,step=9")
    assert lost.code == 3, lost.err
    done = program(*words)
    assert done.code == 0, done.err
    assert "resuming from" in done.out
    assert result_of(program.folder / "run")["steps"] == 20
    again = program(*words)
    assert again.code == 2
    assert "there is nothing to resume" in again.err
