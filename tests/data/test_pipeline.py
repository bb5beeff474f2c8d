"""The classic data path yields the batches of the fast one, with and without loader workers, and leaves no process."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Program, processes_of, ranks_of, result_of, run_forked, wait_for
from faults.conftest import read_errors, read_step, wait_for_exit

from lit_mnist.cli.request import parse
from lit_mnist.data.dataset import Dataset
from lit_mnist.data.digits.split import Samples
from lit_mnist.data.loader import Batch, EvaluationBatches, TrainBatches
from lit_mnist.data.workers import WorkerLostError, load_batches
from lit_mnist.errors import InputError
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.training.job import Splits, plan_for, split_dataset

SMALL: tuple[object, ...] = (
    *("--data.val_size", 24, "--data.test_size", 25, "--batch-size", 12, "--lr", 0.05),
    *("--data.augment", "affine", "--precision", "32-true", "--devices", 2, "--run.threads", 1),
)
SHORT = (*SMALL, "--data.train_size", 120)
# An epoch without an end: its workers are there for as long as the test takes.
LONG = (*SMALL, "--data.train_size", 50_000)
PER_SAMPLE = ("--data.pipeline", "per_sample", "--data.workers")
WAYS = (DataSettings(pipeline="per_sample"), DataSettings(pipeline="per_sample", workers=2))


@pytest.fixture(scope="module")
def splits(embedded: Dataset) -> Splits:
    return split_dataset(Experiment().replace("data", train_size=240, val_size=50, test_size=101), embedded)


def assert_alike(fast: list[Batch], classic: list[Batch]) -> None:
    """Asserts the same samples, and the same images up to rounding; pixels reach 2.8."""
    assert len(fast) == len(classic) > 1
    for one, other in zip(fast, classic, strict=True):
        torch.testing.assert_close(other.images, one.images, rtol=0, atol=1e-6)
        assert torch.equal(other.targets, one.targets)
        assert torch.equal(other.indices, one.indices)
        assert (other.rng is None) == (one.rng is None)
        if one.rng and other.rng:
            assert other.rng[:3] == one.rng[:3]
            assert torch.equal(other.rng.rows, one.rng.rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("augment", ["none", "shift", "affine"])
def test_batches_of_a_resumed_epoch_match_the_fast_path(splits: Splits, augment: str, dtype: torch.dtype) -> None:
    experiment = Experiment().replace("data", batch_size=48, augment=augment).replace("trainer", max_epochs=2)
    plan = plan_for(experiment, splits, world_size=2)

    def batches(way: DataSettings) -> list[Batch]:
        settings = dataclasses.replace(experiment.data, pipeline=way.pipeline, workers=way.workers)
        state = torch.get_rng_state()
        cut = TrainBatches(splits.train, plan=plan, settings=settings, seed=42, epoch=1, rank=1, first=2, dtype=dtype)
        found = list(cut)
        assert len(cut) == 5
        assert torch.equal(torch.get_rng_state(), state)
        return found

    fast = batches(DataSettings())
    assert fast[0].images.dtype == dtype
    without, with_workers = map(batches, WAYS)
    assert_alike(fast, without)
    assert all(torch.equal(one.images, other.images) for one, other in zip(without, with_workers, strict=True))
    assert_alike(fast, with_workers)


@pytest.mark.parametrize("name", ["validation", "test"])
def test_evaluation_batches_match_the_fast_path(splits: Splits, name: str) -> None:
    for rank in range(3):
        fast, *classic = (
            list(EvaluationBatches(getattr(splits, name), rank=rank, world_size=3, batch_size=9, settings=way))
            for way in (DataSettings(), *WAYS)
        )
        for found in classic:
            assert_alike(fast, found)


def test_a_rank_without_samples_starts_no_workers(splits: Splits) -> None:
    assert not list(EvaluationBatches(splits.test, rank=0, world_size=500, batch_size=9, settings=WAYS[1]))


@pytest.fixture(scope="module")
def reference(shared_program: Program) -> dict[str, Any]:
    """What a training without workers and without interruption gives."""
    return result_of(shared_program.train(*SHORT, *PER_SAMPLE, 0, engine="raw_ddp"))


def assert_same_training(folder: Path, reference: dict[str, Any]) -> None:
    for key in ("weights_sha256", "test", "validation", "steps"):
        assert result_of(folder)[key] == reference[key], key


def test_a_killed_run_with_workers_resumes_exactly_within_an_epoch(program: Program, reference: dict[str, Any]) -> None:
    folder, before = program.folder / "lost", left_in_the_temporary_folder()
    fault = ("--save-every", 1, "--inject", "kill:rank=1,step=6", "--run-dir", folder)
    assert program(*SHORT, *PER_SAMPLE, 2, *fault, engine="raw_ddp").code == 3
    done = program("--resume", folder, engine="raw_ddp")
    assert done.code == 0, done.err
    assert_same_training(folder, reference)
    assert left_in_the_temporary_folder() == before


def test_lightning_uses_the_loaders_unchanged(program: Program, reference: dict[str, Any]) -> None:
    """Lightning neither warns about them nor wraps them: the result is bit-identical to that without a framework."""
    folder = program.folder / "run"
    done = program(*SHORT, *PER_SAMPLE, 1, "--run-dir", folder)
    assert done.code == 0, done.err
    assert "arning" not in done.err, done.err
    assert_same_training(folder, reference)


def test_an_exception_in_a_worker_is_raised_in_its_rank(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Samples, index: int) -> tuple[torch.Tensor, int]:
        raise LookupError(f"sample {index}, threads {torch.get_num_threads()}")

    monkeypatch.setattr(Samples, "__getitem__", failing)
    # With threads in the rank: a worker that started some of its own would wait for ever.
    done = program(*SHORT, "--run.threads", 2, *PER_SAMPLE, 2, engine="raw_ddp")
    assert done.code == 3
    assert re.search(r"error: Rank \d \(.*\) failed", done.err), done.err
    assert re.search(r"LookupError: sample \d+, threads 1\b", done.err), done.err


class LargeSamples:
    """Samples that do not fit into a pipe, so that a worker is always writing one."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1 << 18,), float(index)), index


class Waiter:
    """Receives the signal of a killed worker when it is released."""

    def release(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def is_asleep(pid: int) -> bool:
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"S"}


def test_a_killed_worker_is_noticed_while_its_rank_gives_out_indices(tmp_path: Path) -> None:
    """`Condition.notify` ignores a RuntimeError, and the rest of the batch never arrives."""

    def work() -> int:
        # The threads that send indices inherit the mask.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        batches = load_batches(LargeSamples(), [np.array([index]) for index in range(8)], 1)  # type: ignore[arg-type]
        next(batches)
        (worker,) = multiprocessing.active_children()
        # It waits for its next index, and until its rank reads what it writes.
        wait_for(lambda: is_asleep(worker.pid or 0), 20)
        os.kill(worker.pid or 0, signal.SIGKILL)
        # Returns as soon as the worker has ended, and lets torch find that.
        os.waitid(os.P_PID, worker.pid or 0, os.WEXITED | os.WNOWAIT)
        condition = threading.Condition()
        condition._waiters.append(Waiter())  # type: ignore[attr-defined]
        try:
            with condition:
                condition.notify()
            next(batches)
        except WorkerLostError as error:
            return 0 if "killed by signal" in str(error) else 1
        return 2

    assert run_forked(work, tmp_path, 40).code == 0


def workers_of(launcher: int) -> set[int]:
    """Returns the loader workers of a running command: the children of its ranks, which are the launcher's."""
    found = set()
    for pid in set(processes_of(launcher)) - {launcher}:
        with suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != launcher:
                found.add(pid)
    return found


def left_in_the_temporary_folder() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("pymp-*")}


@pytest.mark.parametrize(
    ("victim", "signum", "code"),
    [
        ("worker", signal.SIGKILL, 3),
        ("rank", signal.SIGKILL, 3),
        ("launcher", signal.SIGKILL, -9),
        ("group", signal.SIGTERM, 143),
    ],
)
def test_workers_end_with_their_rank(program: Program, victim: str, signum: signal.Signals, code: int) -> None:
    folder = program.folder / "run"
    words = (*LONG, *PER_SAMPLE, 2, "--run-dir", folder)
    with program.started(*words, engine="raw_ddp") as group:
        wait_for(lambda: read_step(folder) > 3, 60, program.folder)
        workers = workers_of(group)
        assert len(workers) == 4
        ranks = ranks_of(group, [pid for pid in processes_of(group) if pid not in workers])
        if victim == "group":
            os.killpg(group, signum)
        else:
            os.kill({"worker": max(workers), "rank": ranks[1], "launcher": group}[victim], signum)
        ended, _ = wait_for_exit(group, program, 20)
    message = read_errors(program)
    assert ended == code, message
    if victim == "worker":
        assert re.search(r"Rank \d .* failed in step \d+:", message), message
        assert "DataLoader worker" in message
    if victim == "rank":
        assert re.search(r"Rank 1 .* was killed by SIGKILL in step \d+", message), message
    if victim == "group":
        assert re.search(r"error: Stopped by SIGTERM after step \d+\.", message), message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data.pipeline=streamed",), "per_sample"),
        (("--data.workers=2",), "data.workers 2 needs data.pipeline per_sample"),
        (("--data.pipeline=per_sample", "--data.workers=-1"), "data.workers must be from 0 to 64, but is -1"),
        (("--data.pipeline=per_sample", "--data.workers=65"), "data.workers must be from 0 to 64, but is 65"),
    ],
)
def test_a_wrong_pipeline_is_rejected(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse(list(words)).experiment()
