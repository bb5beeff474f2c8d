"""The faults that every training survives, with MNIST and with a user's module: there is one run system."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from conftest import Program, flipped, result_of
from processes import ROOT, wait_for

from faults.conftest import SMALL, read_errors, read_step, wait_for_exit
from faults.test_save import fill, newest, small_disk

IMPORT = {"mnist": (), "user": ("--import", "spirals")}
CODES = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 138, signal.SIGHUP: 129}


@pytest.fixture(params=[pytest.param("mnist", marks=pytest.mark.slow), "user"])
def kind(request: pytest.FixtureRequest, program: Program) -> str:
    """What is trained."""
    for name in ("spirals", "spirals.yaml") if request.param == "user" else ():
        source = ROOT / "examples" / "user_module" / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, program.folder / name)
    return str(request.param)


def words_of(kind: str, epochs: int = 3) -> tuple[object, ...]:
    """A training on two ranks that saves every five steps."""
    what = SMALL if kind == "mnist" else ("--config", "spirals.yaml", *IMPORT[kind], "--run.threads", 1)
    return ("fit", *what, "--devices", 2, "--save-every", 5, "--epochs", epochs)


def assert_resumes(program: Program, kind: str, folder: Path) -> str:
    """Asserts that a resumed run ends as one that was not interrupted, and returns its output."""
    done = program("fit", "--resume", folder, *IMPORT[kind])
    assert done.code == 0, done.out + done.err
    whole = program.train(*words_of(kind))
    for key in ("weights_sha256", "steps", "epochs", "validation"):
        assert result_of(folder)[key] == result_of(whole)[key], key
    return done.out


def test_a_killed_run_resumes(program: Program, kind: str) -> None:
    folder = program.folder / "run"
    with program.started(*words_of(kind), "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 8, 60, program.folder)
        os.kill(group, signal.SIGKILL)
        wait_for_exit(group, program, 5)
    assert "was killed" in assert_resumes(program, kind, folder)


def test_a_killed_rank_is_named_and_the_run_restarts(program: Program, kind: str) -> None:
    folder = program.folder / "run"
    words = ("--inject", "kill:rank=1,step=13", "--max-restarts", 1, "--run-dir", folder)
    done = program(*words_of(kind), *words)
    assert done.code == 0, done.out + done.err
    assert re.search(r"Rank 1 \(process \d+ on \S+\) was killed by SIGKILL in step 13", done.err), done.err
    whole = program.train(*words_of(kind))
    assert result_of(folder)["weights_sha256"] == result_of(whole)["weights_sha256"]


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_a_step_of_all_ranks(program: Program, kind: str, signum: signal.Signals) -> None:
    folder = program.folder / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with program.started(*words_of(kind), "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 8, 60, program.folder)
        os.kill(group, signum)
        code, _ = wait_for_exit(group, program, 20)
    signal.signal(signal.SIGHUP, before)
    assert code == CODES[signum], read_errors(program)
    message = re.search(rf"Stopped by {signum.name} after step (\d+)\.", read_errors(program))
    assert message, read_errors(program)
    assert newest(folder)["global_step"] == int(message[1])
    assert_resumes(program, kind, folder)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_skipped(program: Program, kind: str) -> None:
    folder = program.folder / "run"
    done = program(*words_of(kind), "--inject", "kill:rank=0,step=37", "--run-dir", folder)
    assert done.code == 3, done.err
    last = folder / "checkpoints" / "last.ckpt"
    content = flipped(last.read_bytes(), 100)
    last.unlink()
    last.write_bytes(content)
    out = assert_resumes(program, kind, folder)
    assert re.search(r"warning: \S+last\.ckpt is damaged", out)
    assert "It is skipped" in out


@pytest.mark.needs("mounts")
def test_a_full_disk_ends_the_run_and_keeps_the_last_checkpoint(program: Program, kind: str) -> None:
    with small_disk(program.folder / "disk", "4m") as disk:
        folder = disk / "run"
        with program.started(*words_of(kind, 200), "--run-dir", folder) as group:
            wait_for(lambda: read_step(folder) > 22, 60, program.folder)
            fill(disk / "others")
            code, _ = wait_for_exit(group, program, 30)
        assert code == 2, read_errors(program)
        assert "Traceback" not in read_errors(program)
        assert newest(folder)["global_step"] >= 20
        assert "The newest valid checkpoint, after step" in read_errors(program)
