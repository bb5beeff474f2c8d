"""What is promised on a processor holds on a GPU; and nothing waits there."""

from __future__ import annotations

import itertools
import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import GPUS, Program, largest_difference, result_of, weights_of

from lit_mnist.profiling.timing import StepClock

pytestmark = pytest.mark.needs("gpu")

# Two epochs of 40 steps, the second cut short.
RECIPE: tuple[object, ...] = (
    *("--data.val_size", 100, "--data.test_size", 1000, "--data.train_size", 64 * 40, "--data.augment", "affine"),
    *("--epochs", 2, "--devices", 1),
)
WORDS: tuple[object, ...] = (*RECIPE, "--trainer.accelerator", "gpu", "--max-steps", 60)
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
ENGINES = ("single", "lightning", "raw_ddp", "fabric", "with_accelerate", "with_hf_trainer")


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the processes that a test starts see the first GPU, which conftest hides from all others."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", GPUS[0])
    yield
    # This process starts others by forking, which none may that has used a GPU.
    assert not torch.cuda.is_initialized()


WHOLE: dict[tuple[str, ...], dict[str, Any]] = {}


def whole(program: Program, engine: str, precision: str, *words: object) -> dict[str, Any]:
    """Returns the result of an uninterrupted training, made once."""
    key = (engine, precision, *map(str, words))
    if key not in WHOLE:
        WHOLE[key] = result_of(program.train(*WORDS, "--precision", precision, *words, engine=engine))
    return WHOLE[key]


@pytest.mark.parametrize(("engine", "precision"), list(itertools.product(ENGINES[1:], PRECISIONS)))
def test_every_engine_trains_the_same_bits(shared_program: Program, engine: str, precision: str) -> None:
    found = whole(shared_program, engine, precision)
    expected = whole(shared_program, "single", precision)
    assert found["device"].startswith("cuda")
    assert found["precision"] == precision
    for key in ("weights_sha256", "steps", "skipped_steps", "validation", "test"):
        assert found[key] == expected[key], key


@pytest.mark.parametrize("engine", ["single", "lightning"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_recorded_graph_trains_the_same_bits(shared_program: Program, engine: str, precision: str) -> None:
    recorded = whole(shared_program, engine, precision)
    queued = whole(shared_program, engine, precision, "--run.cuda_graph", "false")
    assert (recorded["cuda_graph"], queued["cuda_graph"]) == (True, False)
    assert recorded["weights_sha256"] == queued["weights_sha256"]
    assert recorded["train"]["loss"] == queued["train"]["loss"]


@pytest.mark.parametrize("engine", ["single", "lightning"])
@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "16-mixed", "--model.weight_decay", 0.01, "--trainer.gradient_clip_val", 0.5),
        ("--precision", "32-true", "--model.momentum", 0, "--model.nesterov", "false"),
        ("--precision", "bf16-mixed", "--model.nesterov", "false", "--model.schedule", "cosine"),
        ("--precision", "32-true", "--model.optimizer", "adamw", "--lr", 0.001),
    ],
    ids=["clipped", "no-momentum", "cosine", "adamw"],
)
def test_a_recorded_update_trains_the_same_bits(program: Program, engine: str, options: tuple[object, ...]) -> None:
    recorded, queued = (
        result_of(program.train(*WORDS, *options, "--run.cuda_graph", graph, engine=engine))
        for graph in ("true", "false")
    )
    assert (recorded["cuda_graph"], queued["cuda_graph"]) == (True, False)
    for key in ("weights_sha256", "steps", "skipped_steps", "test"):
        assert recorded[key] == queued[key], key


@pytest.mark.parametrize("engine", ["single", "lightning", "raw_ddp"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    shared_program: Program, engine: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal comes within the second epoch, to a process that replays a graph."""
    program, folder = shared_program, shared_program.folder / f"stopped-{engine}-{precision}"
    expected = whole(program, engine, precision)
    steps = 0
    original = StepClock.on_step_end

    def slowly(self: StepClock, *, waited: bool = True) -> None:
        nonlocal steps
        original(self, waited=waited)
        # So that the ranks agree on signals every few steps.
        time.sleep(0.02)
        steps += 1
        if steps == 47:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(StepClock, "on_step_end", slowly)
        stopped = program(*WORDS, "--precision", precision, "--save-every", 1, "--run-dir", folder, engine=engine)
    assert stopped.code == 128 + signal.SIGTERM, stopped.out + stopped.err
    done = program("--resume", folder, engine=engine)
    assert done.code == 0, done.out + done.err
    for key in ("weights_sha256", "steps", "skipped_steps", "test"):
        assert result_of(folder)[key] == expected[key], key


def test_a_run_goes_on_in_another_engine(shared_program: Program) -> None:
    program, folder = shared_program, shared_program.folder / "handed-over"
    words = (*WORDS, "--precision", "bf16-mixed", "--save-every", 1, "--inject", "raise:rank=0,step=50")
    lost = program(*words, "--run-dir", folder, engine="single")
    assert lost.code != 0, lost.out + lost.err
    done = program("--resume", folder, engine="lightning")
    assert done.code == 0, done.out + done.err
    assert result_of(folder)["cuda_graph"]
    assert result_of(folder)["weights_sha256"] == whole(program, "single", "bf16-mixed")["weights_sha256"]


@pytest.mark.parametrize("net", ["convnet", "basicnet"])
def test_a_gpu_and_a_processor_train_the_same_weights_but_for_rounding(shared_program: Program, net: str) -> None:
    """In 64 bits; without dropout, whose masks each device draws by its own generator."""
    words = ("--precision", "64-true", "--model.net", net, "--model.dropout", 0, "--max-steps", 30, "--lr", 0.01)
    gpu, cpu = (
        shared_program.train(*RECIPE, *words, "--trainer.accelerator", kind, engine="single") for kind in ("gpu", "cpu")
    )
    assert result_of(gpu)["test"]["count"] == result_of(cpu)["test"]["count"] == 1000
    assert largest_difference(weights_of(gpu), weights_of(cpu)) <= 1e-8


@pytest.mark.parametrize(
    ("engine", "graph", "precision"),
    [
        *((engine, "true", precision) for engine in ("single", "lightning") for precision in PRECISIONS),
        *((engine, "false", "bf16-mixed") for engine in ENGINES),
    ],
)
def test_no_step_waits_for_the_gpu(
    program: Program, monkeypatch: pytest.MonkeyPatch, engine: str, graph: str, precision: str
) -> None:
    """torch itself reports each read, here from step 10 to 39, between two logged steps."""
    seen: list[str] = []
    steps = 0
    original = StepClock.on_step_end

    def watched(self: StepClock, *, waited: bool = True) -> None:
        nonlocal steps
        original(self, waited=waited)
        steps += 1
        if steps == 9:
            warnings.showwarning = lambda message, *_: seen.append(str(message))  # type: ignore[assignment]
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        elif steps == 39:
            assert float(torch.ones(1, device="cuda")) == 1
            torch.cuda.set_sync_debug_mode("default")
            (program.folder / "seen.txt").write_text("\n".join(seen))

    monkeypatch.setattr(StepClock, "on_step_end", watched)
    program.train(*WORDS, "--precision", precision, "--run.cuda_graph", graph, engine=engine)
    told = (program.folder / "seen.txt").read_text().splitlines()
    # The one read at the end shows that reads are seen.
    assert len([line for line in told if "called a synchronizing" in line]) == 1, told


@pytest.mark.parametrize("engine", ["single", "lightning"])
def test_a_loss_that_is_no_number_ends_a_recorded_run(program: Program, engine: str) -> None:
    done = program(*WORDS, "--precision", "bf16-mixed", "--lr", "1.0e+30", engine=engine)
    assert done.code == 4, done.out + done.err
    assert "not finite" in done.err or "nan" in done.err


@pytest.mark.parametrize("engine", ["lightning", "raw_ddp"])
def test_a_killed_run_leaves_nothing_and_is_started_again(program: Program, engine: str) -> None:
    words = (*WORDS, "--precision", "bf16-mixed", "--save-every", 10, "--max-restarts", 1)
    folder = program.folder / "run"
    done = program(*words, "--inject", "kill:rank=0,step=33", "--run-dir", folder, engine=engine)
    assert done.code == 0, done.out + done.err
    assert "was killed by SIGKILL in step 33." in done.err
    expected = whole(program, engine, "bf16-mixed")
    assert result_of(folder)["weights_sha256"] == expected["weights_sha256"]


def test_too_many_gpus_are_rejected(program: Program) -> None:
    done = program("--devices", 2, "--max-steps", 5)
    assert done.code == 2
    assert "this machine has 1" in done.err


def test_weights_of_a_gpu_are_evaluated_on_a_processor(program: Program) -> None:
    folder = program.train(*WORDS, "--precision", "32-true", engine="lightning")
    gpu = result_of(folder)["test"]
    done = program("test", "--ckpt", folder, "--trainer.accelerator", "cpu", "--run-dir", program.folder / "cpu")
    assert done.code == 0, done.out + done.err
    cpu = result_of(program.folder / "cpu")["test"]
    assert cpu["count"] == gpu["count"]
    # Where two classes are all but equal, rounding decides.
    assert abs(cpu["accuracy"] - gpu["accuracy"]) <= 2 / 1000
    assert cpu["loss"] == pytest.approx(gpu["loss"], rel=1e-2)
