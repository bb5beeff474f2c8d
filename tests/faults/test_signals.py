"""SIGTERM, SIGINT, SIGUSR1 and SIGHUP to the launcher or a rank: all stop at one step, save, and end with its code."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Program, result_of
from processes import kill, processes_of, ranks_of, run_forked, wait_for

from faults.conftest import SMALL, RecordMetric, read_errors, read_step, wait_for_exit
from lit_mnist.checkpoint.store import find_newest_valid
from lit_mnist.cli.main import main
from lit_mnist.distributed import launcher as launch
from lit_mnist.distributed.signals import STOP
from lit_mnist.engines import lightning as lightning_engine
from lit_mnist.module import LitClassifier

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138, signal.SIGHUP: 129}


@pytest.fixture(autouse=True)
def terminal() -> Iterator[None]:
    """Restores the default of SIGHUP, in case the tests run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def saved_step(folder: Path) -> int:
    """Returns the step of a run's newest checkpoint, which must be valid; 0 if there is none."""
    saved = find_newest_valid(folder, pytest.fail)
    return saved.step if saved else 0


@pytest.mark.parametrize(
    ("engine", "devices", "signum", "to"),
    [
        ("lightning", 2, signal.SIGTERM, "launcher"),
        ("lightning", 2, signal.SIGTERM, "1"),
        ("lightning", 1, signal.SIGUSR1, "launcher"),
        ("raw_ddp", 2, signal.SIGINT, "launcher"),
        ("raw_ddp", 3, signal.SIGTERM, "0"),
        ("lightning", 2, signal.SIGHUP, "all"),
        ("raw_ddp", 2, signal.SIGHUP, "1"),
        ("single", 1, signal.SIGTERM, "launcher"),
    ],
)
def test_a_signal_stops_all_ranks_at_one_step_that_is_saved(
    program: Program, record_metric: RecordMetric, engine: str, devices: int, signum: signal.Signals, to: str
) -> None:
    folder = program.folder / "run"
    words = (*SMALL, "--epochs", 50, "--devices", devices, "--run-dir", folder)
    with program.started(*words, engine=engine) as group:
        metrics = folder / "metrics.csv"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1, 60, program.folder)
        time.sleep(0.3)
        if to == "all":
            # As the kernel does when a terminal is closed.
            os.killpg(group, signum)
        else:
            os.kill(group if to == "launcher" else ranks_of(group)[int(to)], signum)
        code, seconds = wait_for_exit(group, program, 20)
    assert code == CODES[signum], read_errors(program)
    assert seconds < 10
    # Ctrl-C is not an error.
    prefix = "" if signum == signal.SIGINT else "error: "
    message = re.search(rf"^{prefix}Stopped by {signum.name} after step (\d+)\.", read_errors(program), re.MULTILINE)
    assert message, read_errors(program)
    assert saved_step(folder) == int(message[1]) > 0
    assert "Traceback" not in read_errors(program)
    record_metric(f"{signum.name} to {to} of {devices}, {engine}", f"exit {code} after {seconds:.1f} s")


def test_under_nohup_a_run_outlives_its_terminal(program: Program) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    folder = program.folder / "run"
    with program.started(*SMALL, "--epochs", 2, "--devices", 2, "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 1, 60, program.folder)
        os.killpg(group, signal.SIGHUP)
        code, _ = wait_for_exit(group, program, 60)
    assert code == 0, read_errors(program)
    assert result_of(folder)["steps"] == 40


@pytest.mark.slow
def test_a_stopped_and_resumed_run_is_bit_identical(program: Program) -> None:
    folder = program.folder / "run"
    words = (*SMALL, "--epochs", 3, "--devices", 2, "--data.augment", "affine")
    with program.started(*words, "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 25, 60, program.folder)
        os.kill(group, signal.SIGTERM)
        code, _ = wait_for_exit(group, program, 20)
    assert code == 143
    done = program("--resume", folder)
    assert done.code == 0, done.err
    whole = program.train(*words)
    for key in ("weights_sha256", "test", "validation", "steps"):
        assert result_of(folder)[key] == result_of(whole)[key]


def at_random_moments(program: Program, count: int, seed: int, *, devices: int) -> Counter[str]:
    """Sends SIGTERM to a launcher or a rank at random times of short runs, and returns the phases."""
    drawn, seen = random.Random(seed), Counter[str]()
    words = (*SMALL, "--epochs", 2, "--devices", devices, "--save-every", 4)
    began = time.monotonic()
    program.train(*words)
    whole = time.monotonic() - began
    for number in range(count):
        folder = program.folder / f"stopped-{number}"
        with program.started(*words, "--run-dir", folder) as group:
            time.sleep(drawn.uniform(0, whole))
            ranks = list(ranks_of(group).values())
            phase = "in a step" if read_step(folder) else "outside of steps"
            kill(drawn.choice([group, *ranks]), signal.SIGTERM)
            code, seconds = wait_for_exit(group, program, 20)
        assert seconds < 10, f"{seconds} s"
        metrics = folder / "metrics.csv"
        trained = metrics.exists() and len(metrics.read_text().splitlines()) > 1
        if (folder / "result.json").exists():
            # The signal arrived after the end of the work, possibly at a rank that had exited.
            assert code in {0, 143}, read_errors(program)
            phase = "at the end"
        else:
            # Before Python installs a handler, the signal kills the process.
            assert code in {143, -signal.SIGTERM}, (code, read_errors(program))
            # Of this program. A child process of a library may also complain about its lost parent.
            assert '.py", line' not in read_errors(program)
        if trained:
            assert saved_step(folder) > 0
        seen[phase] += 1
    return seen


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3000)])])
def test_sigterm_at_random_times_ends_a_run_cleanly(program: Program, record_metric: RecordMetric, count: int) -> None:
    seen = at_random_moments(program, count, seed=3, devices=2)
    message = ", ".join(f"{number} {phase}" for phase, number in sorted(seen.items()))
    record_metric(
        "SIGTERM at random moments", f"{count} runs ({message}): exit 143, each with a valid checkpoint, no hang"
    )


def test_a_rank_that_does_not_stop_is_killed_in_time(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SECONDS_TO_STOP", 3.0)
    folder = program.folder / "run"
    with program.started(*SMALL, "--epochs", 50, "--devices", 2, "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 5, 60, program.folder)
        os.kill(ranks_of(group)[1], signal.SIGSTOP)
        os.kill(group, signal.SIGTERM)
        code, seconds = wait_for_exit(group, program, 20)
    assert code == 143, read_errors(program)
    assert 3 < seconds < 6


def test_lightning_does_not_handle_signals(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's handler of SIGTERM is not installed, and no step broadcasts to check for a signal."""
    original = lightning_engine._trainer

    def watched(*arguments: Any) -> Any:
        trainer: Any = original(*arguments)

        def on_train_batch_start(*_: object) -> None:
            assert signal.getsignal(signal.SIGTERM) == STOP._handle

        trainer.callbacks[0].on_train_batch_start = on_train_batch_start
        return trainer

    monkeypatch.setattr(lightning_engine, "_trainer", watched)
    folder = program.train(*SMALL, "--devices", 2, "--max-steps", 14, "--run.trace", "traffic")
    traffic = json.loads((folder / "trace" / "rank-0.json").read_text())["traffic"]
    assert traffic["collectives"]
    assert not [name for name in traffic["collectives"] if "broadcast" in name]


def test_a_second_signal_changes_nothing(program: Program) -> None:
    folder = program.folder / "run"
    with program.started(*SMALL, "--epochs", 50, "--devices", 2, "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 5, 60, program.folder)
        for pid in (group, *processes_of(group)):
            kill(pid, signal.SIGINT)
        kill(group, signal.SIGINT)
        code, _ = wait_for_exit(group, program, 20)
    assert code == 130, read_errors(program)
    assert saved_step(folder) > 5


def test_a_signal_ends_other_commands_at_once(program: Program) -> None:
    trained = program.train(*SMALL, "--max-steps", 2)

    def interrupted() -> int:
        os.chdir(program.folder)
        # In a fork: no other test sees this.
        LitClassifier.test_step = lambda *_: os.kill(os.getpid(), signal.SIGTERM)  # type: ignore[assignment, method-assign]
        return main(["test", "--ckpt", str(trained), "--data.eval_batch_size", "1", "--run-dir", "other"])

    done = run_forked(interrupted, program.folder, 20)
    assert done.code == 143, done.err
    assert "error: Stopped by SIGTERM" in done.err
