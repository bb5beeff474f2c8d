"""Failures: what is named, what is saved, what is left."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Command, Completed

MODULE = ("fit", "--model", "others.Net", "--data", "others.Points")
TWO = (*MODULE, "--devices", "2", "--precision", "32-true", "--trainer.num_sanity_val_steps", "0")
SLOW = ("--epochs", "1000", "--trainer.callbacks+=others.Fault", "--trainer.callbacks.kind=slow")


def is_training(run: Command, folder: Path) -> Callable[[], bool]:
    return (folder / "checkpoints" / "last.ckpt").exists


def gone(pids: list[int], seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}/exe").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_a_killed_process_is_named_and_none_is_left(
    start_command: Callable[..., Command], tmp_path: Path, victim: str
) -> None:
    run = start_command(*TWO, *SLOW, "--run-dir", "run")
    run.wait_for(is_training(run, tmp_path / "run"))
    ranks = run.children()
    killed = ranks[1] if victim == "rank" else run.pid
    os.kill(killed, signal.SIGKILL)
    begin = time.monotonic()
    run.process.join(5)
    assert run.process.exitcode == (3 if victim == "rank" else -signal.SIGKILL), run.text()
    assert gone(ranks, 5 - (time.monotonic() - begin))
    if victim == "rank":
        assert f"rank 1 (process {killed})" in run.text() and "SIGKILL" in run.text()


@pytest.mark.parametrize(("signum", "target"), [(signal.SIGTERM, "launcher"), (signal.SIGINT, "rank")])
def test_a_signal_stops_all_ranks_at_one_saved_step(
    start_command: Callable[..., Command], tmp_path: Path, signum: int, target: str
) -> None:
    run = start_command(*TWO, *SLOW, "--run-dir", "run")
    run.wait_for(is_training(run, tmp_path / "run"))
    os.kill(run.pid if target == "launcher" else run.children()[1], signum)
    completed = run.wait(20)
    assert completed.code == 128 + signum, completed.output
    # Other checkpoints are of the end of an epoch of ten steps.
    assert step_of(tmp_path / "run") % 10 != 0


def step_of(folder: Path) -> int:
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    return int(checkpoint["global_step"])


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("raise", 3, ["rank 1", "step 5", "the fault of the test"]),
        ("nan", 4, ["rank 1", "step 5"]),
        ("hang", 3, ["rank 1", "step 5"]),
    ],
)
def test_a_fault_is_reported_with_rank_and_step(
    command: Callable[..., Completed], kind: str, code: int, words: list[str]
) -> None:
    fault = ("--trainer.callbacks+=others.Fault", f"--trainer.callbacks.kind={kind}", "--trainer.timeout", 5)
    completed = command(*TWO, *fault, "--max-steps", 20, "--run-dir", "run")
    assert completed.code == code, completed.output
    assert all(word in completed.output for word in words), completed.output


def test_restarts_end_bit_identical(train: Callable[..., dict[str, Any]]) -> None:
    words = (*TWO, "--max-steps", 40, "--data.loader", "resumable")
    fault = ("--trainer.callbacks+=others.Fault", "--trainer.callbacks.kind=kill_once", "--trainer.callbacks.step=27")
    whole = train(*words)
    restarted = train(*words, *fault, "--max-restarts", 1)
    assert Path("killed").exists()
    assert restarted["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_broken_standard_output_ends_no_run(
    start_command: Callable[..., Command], tmp_path: Path, devices: int
) -> None:
    run = start_command(*MODULE, "--devices", devices, "--max-steps", 30, "--run-dir", "run", BROKEN_STDOUT="1")
    assert run.wait(60).code == 0
    assert (tmp_path / "run" / "result.json").exists()


def test_nothing_listens_beyond_loopback(start_command: Callable[..., Command], tmp_path: Path) -> None:
    run = start_command(*TWO, *SLOW, "--run-dir", "run")
    run.wait_for(is_training(run, tmp_path / "run"))
    inodes = set()
    for pid in [run.pid, *run.children()]:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            inodes.add(str(descriptor.readlink()))
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                listening.append(fields[1].split(":")[0])
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000"}, listening
