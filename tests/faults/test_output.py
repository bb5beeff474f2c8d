"""The output of a run: it ends no run, names the true cause, and does not let a file control the terminal."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import CHILD_ENV, Program, result_of
from processes import ROOT, Done, kill, launched, named, run_forked, torchrun, wait_for
from torch import nn
from torch.distributed import DistStoreError
from torch.nn.parallel import DistributedDataParallel

from faults.conftest import SMALL, read_step, wait_for_exit
from faults.terminal import in_terminal
from lit_mnist.checkpoint.format import read_checkpoint, write_checkpoint
from lit_mnist.checkpoint.store import find_newest_valid
from lit_mnist.cli.main import main
from lit_mnist.distributed.failure import find_first_failure, is_peer_failure
from lit_mnist.distributed.peer_exchange import PeerExchange
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.terminal import escape_control
from lit_mnist.distributed.torch_internals import FailedAttempt
from lit_mnist.run.progress import ProgressDisplay

SECONDS = 120


def to_a_reader_that_leaves() -> None:
    """Redirects standard output to a pipe whose reader exits after the first line."""
    reader = subprocess.Popen(["head", "-1"], stdin=subprocess.PIPE, stdout=2)
    assert reader.stdin is not None
    os.dup2(reader.stdin.fileno(), 1)
    reader.stdin.close()


def to_a_full_disk() -> None:
    """Redirects standard output to a full device."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


def to_nothing() -> None:
    """Closes the descriptor of standard output."""
    os.close(1)


def printing(program: Program, redirect: Callable[[], None], *words: object, engine: str) -> Done:
    """Runs a command whose standard output was redirected."""

    def work() -> int:
        os.chdir(program.folder)
        redirect()
        sys.stdout = os.fdopen(1, "w", closefd=False) if redirect is not to_nothing else None
        return main([str(word) for word in words], engine=engine)

    return run_forked(work, program.folder)


@pytest.mark.parametrize(
    ("engine", "devices", "redirect"),
    [
        pytest.param("raw_ddp", 1, to_a_reader_that_leaves, marks=pytest.mark.slow),
        pytest.param("raw_ddp", 2, to_a_reader_that_leaves, marks=pytest.mark.slow),
        pytest.param("lightning", 1, to_a_reader_that_leaves, marks=pytest.mark.slow),
        ("lightning", 2, to_a_reader_that_leaves),
        ("raw_ddp", 2, to_a_full_disk),
        ("single", 1, to_nothing),
    ],
)
def test_a_standard_output_that_cannot_be_written_does_not_end_the_run(
    program: Program, engine: str, devices: int, redirect: Callable[[], None]
) -> None:
    folder = program.folder / "run"
    # Without the notes on the precision and the learning rate, the command prints one line before the ranks do.
    silent = ("--precision", "32-true", "--model.schedule", "constant")
    words = (*SMALL, *silent, "--devices", devices, "--epochs", 3, "--run-dir", folder)
    done = printing(program, redirect, *words, engine=engine)
    assert done.code == 0, done.err
    assert result_of(folder)["steps"] == 60
    assert "Traceback" not in done.err
    assert "Exception ignored" not in done.err
    if redirect is not to_nothing:
        assert "can no longer write its standard output" in done.err
    if redirect is to_a_reader_that_leaves:
        # The reader has read what the command prints before it starts the ranks.
        assert "can no longer write its standard output" in (folder / "logs" / "rank-0.log").read_text()


@pytest.mark.slow
def test_a_shell_pipe_whose_reader_exits_does_not_end_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train.py", *map(str, SMALL), "--devices", "2", "--epochs", "1", "--run-dir", str(folder)]
    script = 'python="$1"; shift; "$python" "$@" | head -1; exit "${PIPESTATUS[0]}"'
    command = ["bash", "-c", script, "bash", sys.executable, *words]
    done = subprocess.run(
        command, cwd=ROOT, env=CHILD_ENV, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert result_of(folder)["steps"] == 20
    assert done.stdout.count("\n") == 1


def test_a_standard_error_that_cannot_be_written_keeps_the_exit_code(program: Program) -> None:
    def work() -> int:
        os.chdir(program.folder)
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        return main(["--batch-size", "33", "--devices", "2"], engine="raw_ddp")

    assert run_forked(work, program.folder).code == 2


@pytest.mark.parametrize("engine", ["lightning", "raw_ddp", "single"])
def test_an_epoch_is_saved_before_it_is_shown(program: Program, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(ProgressDisplay, "line", fail)
    folder = program.folder / "run"
    done = program(*SMALL, "--run-dir", folder, engine=engine)
    assert done.code == 3, done.err
    assert "ZeroDivisionError: planted" in done.err
    saved = find_newest_valid(folder, pytest.fail)
    assert saved is not None
    assert saved.step == 20


OWN_WORDS = ("timed out: Broken pipe", "Connection closed by peer", "[/gloo/transport/tcp/pair.cc:1] reset by peer")


@pytest.mark.parametrize(
    ("kind", "words"), list(zip((TimeoutError, BrokenPipeError, RuntimeError), OWN_WORDS, strict=True))
)
def test_an_error_of_the_user_is_shown_with_any_message(tmp_path: Path, kind: type[Exception], words: str) -> None:
    def work(rank: Rank) -> None:
        if rank.rank == 1:
            raise kind(words)
        signal.pause()

    done = launched(work, tmp_path, world_size=2)
    assert done.code == 3
    assert re.search(r"Rank 1 \(process \d+ on \S+\) failed:\nTraceback", done.out), done.out
    assert f"{kind.__name__}: {words}" in done.out


def test_no_traceback_is_hidden_if_no_other_rank_has_failed(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections of both ranks fail at once, and no rank has exited."""
    trade = PeerExchange._send_and_receive

    def cut(self: PeerExchange, rows: Any, rank: int, peers: dict[int, socket.socket]) -> None:
        if self._calls == 30:
            for peer in peers.values():
                peer.settimeout(0.0001 if rank else 0.001)
            time.sleep(rank)
        trade(self, rows, rank, peers)

    monkeypatch.setattr(PeerExchange, "_send_and_receive", cut)
    done = program(*SMALL, "--devices", 2, "--run-dir", program.folder / "run", engine="raw_ddp")
    assert done.code == 3
    assert "Traceback (most recent call last)" in done.err, done.err
    assert "TimeoutError: timed out" in done.err or "closed by peer" in done.err


def test_one_rank_has_lost_no_other(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DistStoreError("Broken pipe: timed out")

    monkeypatch.setattr(ProgressDisplay, "line", fail)
    done = program(*SMALL, "--run-dir", program.folder / "run", engine="single")
    assert done.code == 3
    assert re.search(r"error: Rank 0 \(process \d+ on \S+\) failed in step \d+:\nTraceback", done.err), done.err
    assert "another rank" not in done.err


@pytest.mark.parametrize(
    ("call", "ends"),
    [
        *((call, True) for call in ("all_reduce", "exchange")),
        ("backward", False),
        pytest.param("store", False, marks=pytest.mark.slow),
        *(pytest.param(call, True, marks=pytest.mark.slow) for call in ("barrier", "all_gather_object", "backward")),
        pytest.param("exchange", False, marks=pytest.mark.slow),
    ],
)
def test_a_failed_connection_is_not_the_cause(tmp_path: Path, call: str, ends: bool) -> None:
    """Rank 1 fails or stops responding. The error of rank 0 then reports it, wherever it is raised."""

    def work(rank: Rank) -> None:
        dist.init_process_group("gloo", timeout=timedelta(seconds=30 if ends else 2))
        model, exchange = DistributedDataParallel(nn.Linear(2, 2)), PeerExchange(timeout=2)
        exchange.all_gather(torch.ones(1))
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
            "barrier": dist.barrier,
            "all_gather_object": lambda: dist.all_gather_object([None, None], 1),
            "backward": lambda: model(torch.ones(1, 2)).sum().backward(),
            "store": lambda: dist.TCPStore("127.0.0.1", free, timeout=timedelta(seconds=1), is_master=False),
            "exchange": lambda: exchange.all_gather(torch.ones(1)),
        }
        if rank.rank == 1:
            if ends:
                time.sleep(0.3)
                raise ZeroDivisionError("planted")
            time.sleep(8)
            return
        try:
            calls[call]()
        except Exception as error:
            print(f"lost: {is_peer_failure(error)}", flush=True)
            raise

    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    done = launched(work, tmp_path, world_size=2)
    assert done.code == 3
    assert "lost: True" in done.out, done.out
    if ends:
        assert re.search(r"Rank 1 \(process \d+ on \S+\) failed:\nTraceback", done.out), done.out
        assert "ZeroDivisionError: planted" in done.out.splitlines()[-1]
    else:
        assert re.search(
            r"Rank 0 \(.*\) could not continue, since another rank has exited or does not respond", done.out
        )
        assert "Traceback" in done.out


def test_a_rank_that_has_lost_another_one_is_not_the_cause_even_if_it_reports_first() -> None:
    """Both have exited when the launcher looks."""
    times = {0: 1.0, 1: 2.0}
    reports = {
        rank: {"message": "", "stack": f"raised by {rank}", "expected": False, "late_rank": "", "time": times[rank]}
        | {"peer_failed": rank == 0}
        for rank in times
    }
    status: Any = SimpleNamespace(read=lambda rank: (7, reports[rank]))
    error = find_first_failure(FailedAttempt({0: 3, 1: 3}, {0: 11, 1: 12}), status)
    assert re.fullmatch(r"Rank 1 \(process 12 on \S+\) failed in step 7:\nraised by 1", str(error)), error


def test_an_error_that_is_handled_when_a_connection_fails_is_the_cause(tmp_path: Path) -> None:
    """For example if a library's cleanup after an error waits for the other ranks."""

    def work(rank: Rank) -> None:
        exchange = PeerExchange(timeout=1)
        dist.init_process_group("gloo", timeout=timedelta(seconds=30))
        exchange.all_gather(torch.ones(1))
        if rank.rank == 1:
            signal.pause()
        try:
            raise ZeroDivisionError("planted")
        finally:
            exchange.all_gather(torch.ones(1))

    done = launched(work, tmp_path, world_size=2)
    assert done.code == 3
    assert re.search(r"Rank 0 \(process \d+ on \S+\) failed:\nTraceback", done.out), done.out
    assert "ZeroDivisionError: planted" in done.out


CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
# Moves the cursor, retitles the window, clears the screen by one C1 character, rings, deletes.
HOSTILE = "\x1b[2A\x1b]0;owned\x07\x9b2J\x7f<"


def hostile_checkpoint(path: Path, trained: Path) -> Path:
    """Creates a checkpoint with a valid hash and an unknown setting whose name has control characters."""
    content = read_checkpoint(trained / "checkpoints" / "last.ckpt")
    content["lit_mnist"]["config"][HOSTILE] = 1
    write_checkpoint(path, content)
    return path


@pytest.mark.parametrize("case", ["test", "resume", "name", "lock", "damaged", "raised"])
def test_text_from_files_does_not_control_the_terminal(
    program: Program, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    words = (*SMALL, "--max-steps", 2)
    place = program.folder / f"odd{HOSTILE}"
    code, shown = 2, r"\x1b[2A\x1b]0;owned\x07\x9b2J\x7f<"
    if case == "raised":

        def fail(*_: object) -> None:
            raise ZeroDivisionError(HOSTILE)

        monkeypatch.setattr(ProgressDisplay, "line", fail)
        done, code = program(*words, "--devices", 2, engine="raw_ddp"), 3
        (log,) = program.folder.glob("runs/*/logs/rank-0.log")
        assert shown in log.read_text()
        assert not CONTROL.search(log.read_text())
    elif case == "name":
        done = program("test", "--ckpt", place)
    elif case == "lock":
        (program.folder / "run").mkdir()
        (program.folder / "run" / "run.lock").write_text(f"process {HOSTILE}")
        done, code = program(*words, "--run-dir", program.folder / "run", engine="single"), 0
    else:
        folder = program.train(*words, engine="single")
        checkpoint = hostile_checkpoint(program.folder / "bad.ckpt", folder)
        if case == "damaged":
            (place / "checkpoints").mkdir(parents=True)
            shutil.copy(folder / "checkpoints" / "best.ckpt", place / "checkpoints")
            (place / "checkpoints" / "last.ckpt").write_bytes(b"damaged")
            done, code = program("--resume", place, "--run-dir", program.folder / "other", engine="single"), 2
        else:
            done = program(*(("test", "--ckpt") if case == "test" else ("--resume",)), checkpoint)
    assert done.code == code, done.out + done.err
    assert shown in done.out + done.err
    assert not CONTROL.search(done.out + done.err)


def test_control_characters_are_escaped_and_newlines_are_not() -> None:
    assert escape_control("a\nb") == "a\nb"
    assert escape_control("\u00e9\u4e2d\U0001f600 \\x1b") == "\u00e9\u4e2d\U0001f600 \\x1b"
    for number in (*range(10), *range(11, 32), *range(127, 160), 0xD800, 0xDFFF):
        escaped = escape_control(f"<{chr(number)}>")
        assert escaped.isascii()
        assert escaped.isprintable()
        assert len(escaped) > 3


BAR = re.compile("[\u2501\u2578\u257a]")  # what rich draws bars of


@pytest.mark.parametrize(
    ("engine", "devices", "columns"), [("lightning", 2, 100), ("single", 1, 60), ("fabric", 2, 100)]
)
def test_ctrl_c_in_a_terminal_leaves_the_message_alone(
    program: Program, engine: str, devices: int, columns: int
) -> None:
    folder = program.folder / "run"
    words = [*SMALL, "--precision", "32-true", "--epochs", 50, "--devices", devices, "--run-dir", "run"]

    def work() -> int:
        os.chdir(program.folder)
        return main([str(word) for word in words], engine=engine)

    with in_terminal(work, program.folder, columns) as terminal:
        wait_for(lambda: read_step(folder) > 30 or "epoch 2/50" in terminal.output, 60, program.folder)
        assert BAR.search(terminal.output)
        terminal.press(b"\x03")
        code, _ = wait_for_exit(terminal.group, program, 20)
    lines = [line for line in terminal.screen() if line]
    assert code == 130, lines
    assert not any(BAR.search(line) or "^C" in line or "error" in line for line in lines), lines
    (position,) = [number for number, line in enumerate(lines) if "Stopped by" in line]
    assert re.fullmatch(r"Stopped by SIGINT( after step \d+)?\.", lines[position]), lines
    if engine != "fabric":
        assert lines[position + 1].startswith("The newest valid checkpoint, after step "), lines
    assert position > 0
    assert lines[0].startswith("running   train: "), lines
    assert any(line.startswith("epoch 1/50") for line in lines[1:3]), lines
    # The cursor is visible again.
    assert re.findall(r"\x1b\[\?25[lh]", terminal.output)[-1] == "\x1b[?25h"
    for log in (folder / "logs").glob("rank-*.log"):
        assert "Traceback" not in log.read_text()
    assert "Stopped by SIGINT" in (folder / "logs" / "rank-0.log").read_text()


def test_a_killed_rank_leaves_no_bar_and_no_hidden_cursor(program: Program) -> None:
    words = [*SMALL, "--epochs", 50, "--devices", 2, "--run-dir", "run", "--inject", "kill:rank=0,step=60"]

    def work() -> int:
        os.chdir(program.folder)
        return main([str(word) for word in words], engine="raw_ddp")

    with in_terminal(work, program.folder, 100) as terminal:
        code, _ = wait_for_exit(terminal.group, program, 60)
    lines = [line for line in terminal.screen() if line]
    assert code == 3, lines
    assert not any(BAR.search(line) for line in lines), lines
    assert any(line.startswith("error: Rank 0") for line in lines), lines
    assert re.findall(r"\x1b\[\?25[lh]", terminal.output)[-1] == "\x1b[?25h"


@pytest.mark.parametrize("devices", [1, 2])
def test_a_full_standard_output_causes_one_warning(program: Program, devices: int) -> None:
    # The note on dropped samples is the first output, before a rank starts.
    words = (*SMALL, "--data.train_size", 650, "--max-steps", 3, "--devices", devices, "--run-dir", "run")
    done = printing(program, to_a_full_disk, *words, engine="raw_ddp")
    assert done.code == 0, done.err
    assert done.err.count("can no longer write its standard output (No space left on device)") == 1


@pytest.mark.parametrize("columns", [12, 32, 50, 70, 80, 100, 200])
def test_the_bar_stays_readable_in_a_terminal_of_any_width(tmp_path: Path, columns: int) -> None:
    def work() -> int:
        display = ProgressDisplay(85_900)
        for step in range(1, 4):
            display.update(step * 10_000, {"train_loss": 0.0503, "train_accuracy": 0.9844, "images_per_s": 2458.0})
            display.line(f"epoch {step}")
            display._bar.refresh()  # type: ignore[union-attr]
        display.close()
        return 0

    with in_terminal(work, tmp_path, columns) as terminal:
        assert wait_for_exit(terminal.group, Program(tmp_path), 20)[0] == 0
    lines = [line for line in terminal.screen() if line]
    assert lines[:3] == ["epoch 1", "epoch 2", "epoch 3"], lines
    # One line, of which each part is complete or missing.
    (bar,) = lines[3:]
    # There is space for the echo of Ctrl-C.
    assert len(bar) <= columns - 2
    assert bar.startswith("step 30000" if columns == 12 else "step 30000/85900")
    assert ("loss 0.0503" in bar) == (columns >= 50)
    assert ("batch accuracy 98.44%" in bar) == (columns >= 70)
    assert ("2,458 images/s" in bar) == (columns >= 100)
    assert bool(BAR.search(bar)) == (columns >= 32)
    left = BAR.sub(" ", bar).split()
    known = ["step", "30000/85900", "loss", "0.0503", "batch", "accuracy", "98.44%", "2,458", "images/s"]
    assert all(word in known or re.fullmatch(r"[\d:-]+", word) for word in left) or columns == 12, left


@pytest.mark.slow
@pytest.mark.usefixtures("forked_python")
def test_a_rank_of_torchrun_that_fails_shows_its_traceback_on_the_terminal(program: Program) -> None:
    """Other output of a rank except rank 0 is in its log."""
    folder = program.folder / "torchrun"
    process = torchrun(folder, *SMALL, "--inject", "raise:rank=1,step=5")
    try:
        assert process.wait(60) == 1
    finally:
        for pid in named(folder):
            kill(pid, signal.SIGKILL)
        process.wait(5)
    message = (program.folder / "torchrun.err").read_text()
    assert re.search(r"error: Rank 1 \(process \d+ on \S+\) failed in step 5:\nTraceback", message), message
    assert "InjectedError: --inject raise" in message
