"""A run that is lost at any step and resumed ends with the same weights, optimizer state and figures."""

from __future__ import annotations

import csv
import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Program, largest_difference, result_of, weights_of

from lit_mnist.training.checkpoint import read_checkpoint
from lit_mnist.training.digest import content_sha256

# 20 steps in an epoch, of few samples: BasicNet in float16 and bfloat16 is slow on a CPU.
SMALL: tuple[object, ...] = (
    *("--data.train_size", 240, "--data.val_size", 50, "--data.test_size", 50),
    *("--batch-size", 12, "--lr", 0.01, "--run.threads", 1),
)
ENGINES = {"lightning": 2, "raw_ddp": 2, "single": 1}
# Three micro-batches to a step leave 7 steps in an epoch, the last of two micro-batches.
STEPS = {1: (27, 1, 13, 20), 3: (10, 1, 4, 7)}
QUICK = {
    ("lightning", "convnet", "32-true", 3, 10),
    ("raw_ddp", "basicnet", "32-true", 1, 13),
    ("single", "convnet", "bf16-mixed", 1, 27),
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


def figures_of(folder: Path) -> list[dict[str, str]]:
    """Returns the rows of `metrics.csv` without what depends on the clock or on where figures were asked for."""
    with (folder / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["val_loss"]]
    return [{name: value for name, value in row.items() if name != "images_per_s"} for row in rows]


def content_of(folder: Path) -> str:
    """Returns the digest of a whole checkpoint: weights, optimizer, schedule, scaler, loops, steps, experiment."""
    checkpoint = read_checkpoint(folder / "checkpoints" / "last.ckpt")
    section = checkpoint.pop("lit_mnist")
    kept = {key: section[key] for key in ("precision", "threads", "data_sha256", "batch_size", "total_steps")}
    return content_sha256({**checkpoint, "section": kept})


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
        # Nothing was saved: what was begun is given up for a new run.
        assert not list((folder / "checkpoints").iterdir())
        return
    done = program("--resume", folder, engine=engine)
    assert done.code == 0, done.err
    for key in ("weights_sha256", "steps", "skipped_steps", "epochs", "test", "validation"):
        assert result_of(folder)[key] == result_of(whole)[key], key
    assert content_of(folder) == content_of(whole)
    assert figures_of(folder) == figures_of(whole)


@pytest.mark.parametrize(("before", "after"), [(1, 3), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_another_number_of_ranks_goes_on_within_the_epoch(program: Program, before: int, after: int) -> None:
    """No sample is repeated or lost: in 64-bit precision the weights agree but for rounding."""
    words = (*SMALL, "--precision", "64-true", "--data.augment", "affine", "--epochs", 2)
    whole = weights_of(program.train(*words, "--devices", 1))
    folder = program.folder / "run"
    program(*words, "--devices", before, "--save-every", 1, "--inject", "kill:rank=0,step=9", "--run-dir", folder)
    done = program("--resume", folder, "--devices", after)
    assert done.code == 0, done.err
    assert result_of(folder)["world_size"] == after
    assert largest_difference(whole, weights_of(folder)) <= 1e-8


def test_what_cannot_be_gone_on_with_is_refused_by_both_names(program: Program) -> None:
    folder = program.folder / "run"
    program(*SMALL, "--save-every", 1, "--inject", "kill:rank=0,step=5", "--run-dir", folder)
    for flags, told in (
        (("--model.net", "basicnet"), ("basicnet", "convnet")),
        (("--data.name", "fashion_mnist"), ("fashion_mnist", "mnist")),
        (("--epochs", 3), ("60", "20")),
    ):
        done = program("--resume", folder, *flags)
        assert done.code == 2, done.out + done.err
        assert all(word in done.err for word in told), done.err
    done = program("--resume", folder)
    assert done.code == 0, done.err


@pytest.mark.parametrize("engine", ["single", "lightning"])
def test_a_lone_rank_is_started_again_too(program: Program, engine: str) -> None:
    whole = program.train(*SMALL, engine=engine)
    folder = program.folder / "run"
    words = (*SMALL, "--save-every", 1, "--max-restarts", 1, "--run-dir", folder)
    done = program(*words, "--inject", "kill:rank=0,step=9", engine=engine)
    assert done.code == 0, done.err
    assert "was killed by SIGKILL in step 9." in done.err
    assert result_of(folder)["weights_sha256"] == result_of(whole)["weights_sha256"]


def test_a_complete_run_is_not_taken_up_again_by_a_scheduler(program: Program) -> None:
    """`--resume auto` begins where there is nothing, goes on where there is something, and says when all is done."""
    words = (*SMALL, "--devices", 2, "--resume", "auto", "--save-every", 1, "--run-dir", program.folder / "run")
    lost = program(*words, "--inject", "kill:rank=1,step=9")
    assert lost.code == 3, lost.err
    done = program(*words)
    assert done.code == 0, done.err
    assert "going on from" in done.out
    assert result_of(program.folder / "run")["steps"] == 20
    again = program(*words)
    assert again.code == 2
    assert "there is nothing to go on with" in again.err
