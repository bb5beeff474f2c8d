"""`kill -9` of a rank or of the launcher: all end within 5 seconds, the failed rank is named, nothing is lost."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
from conftest import Program, result_of
from processes import kill, named, processes_of, ranks_of, torchrun, wait_for

from faults.conftest import SMALL, RecordMetric, read_errors, read_step, wait_for_exit

LONG = (*SMALL, "--epochs", 50, "--devices", 2)
LAUNCHERS = {"agent": "lightning", "spawn": "raw_ddp", "torchrun": "raw_ddp"}


def killed(program: Program, launcher: str, victim: str, step: int, number: int) -> float:
    """Kills one process of a new run at a step, checks the processes and messages, and returns the seconds."""
    folder = program.folder / f"{launcher}-{number}"
    words = (*LONG, "--launcher", "spawn") if launcher == "spawn" else LONG
    with program.started(*words, "--run-dir", folder, engine=LAUNCHERS[launcher]) as group:
        wait_for(lambda: read_step(folder) >= step, 120, program.folder)
        target = group if victim == "launcher" else ranks_of(group)[int(victim)]
        began = time.monotonic()
        os.kill(target, signal.SIGKILL)
        code, _ = wait_for_exit(group, program, 20)
        seconds = time.monotonic() - began
    if victim == "launcher":
        assert code == -signal.SIGKILL
    else:
        assert code == 3, read_errors(program)
        assert re.search(
            rf"Rank {victim} \(process {target} on \S+\) was killed by SIGKILL in step \d+", read_errors(program)
        )
    assert "onnection" not in read_errors(program)
    assert seconds < 5, f"{launcher} {victim} at step {step}: {seconds} s"
    return seconds


def trials(program: Program, launcher: str, count: int, seed: int) -> list[float]:
    drawn = random.Random(seed)
    victims = [("0", "1", "launcher")[number % 3] for number in range(count)]
    return [killed(program, launcher, victim, drawn.randrange(1, 60), n) for n, victim in enumerate(victims)]


def test_no_process_remains_after_one_process_is_killed(program: Program, record_metric: RecordMetric) -> None:
    seconds = trials(program, "agent", 2, seed=0)
    record_metric("kill -9, agent", f"{len(seconds)} runs, all gone within {max(seconds):.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("launcher", "count"), [("agent", 140), ("spawn", 30)])
def test_no_process_remains_after_many_kills(
    program: Program, record_metric: RecordMetric, launcher: str, count: int
) -> None:
    seconds = trials(program, launcher, count, seed=1)
    record_metric(
        f"kill -9, {launcher}", f"{len(seconds)} runs, no orphan, no hang, all gone within {max(seconds):.1f} s"
    )


def killed_under_torchrun(program: Program, victim: str, number: int) -> float:
    folder = program.folder / f"torchrun-{number}"
    process = torchrun(folder, *SMALL, "--epochs", 50)
    try:
        metrics = folder / "metrics.csv"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 1, 120)
        time.sleep(random.Random(number).random())
        ranks = ranks_of(process.pid, named(folder))
        began = time.monotonic()
        os.kill(process.pid if victim == "launcher" else ranks[int(victim)], signal.SIGKILL)
        process.wait(20)
        wait_for(lambda: not named(folder), 20)
        seconds = time.monotonic() - began
    finally:
        for pid in named(folder):
            kill(pid, signal.SIGKILL)
        process.wait(5)
    message = (program.folder / f"torchrun-{number}.err").read_text()
    assert process.returncode == (-signal.SIGKILL if victim == "launcher" else 1), message
    if victim != "launcher":
        assert re.search(rf"exitcode\s*: -9 \(pid: {ranks[int(victim)]}\)", message)
    assert seconds < 5, message
    return seconds


@pytest.mark.slow
def test_no_process_remains_under_torchrun(program: Program, record_metric: RecordMetric) -> None:
    record_metric("kill -9, torchrun", f"all gone within {killed_under_torchrun(program, '1', 0):.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_process_remains_after_many_kills_under_torchrun(program: Program, record_metric: RecordMetric) -> None:
    seconds = [killed_under_torchrun(program, ("0", "1", "launcher")[n % 3], n) for n in range(30)]
    record_metric("kill -9, torchrun", f"{len(seconds)} runs, no orphan, no hang, all gone within {max(seconds):.1f} s")


@pytest.mark.slow
def test_the_next_start_reports_a_killed_launcher(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, temporary = program.folder / "run", program.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with program.started(*SMALL, "--devices", 2, "--epochs", 3, "--save-every", 3, "--run-dir", folder) as group:
        wait_for(lambda: read_step(folder) > 8, 60, program.folder)
        os.kill(group, signal.SIGKILL)
        wait_for_exit(group, program, 5)
    assert list(temporary.iterdir())
    done = program("--resume", folder)
    assert done.code == 0, done.err
    assert re.search(rf"the run before this one in \S+ \(process {group} on .*\) was killed", done.out)
    whole = program.train(*SMALL, "--devices", 2, "--epochs", 3)
    assert result_of(folder)["weights_sha256"] == result_of(whole)["weights_sha256"]
    assert not list(folder.glob("**/.*tmp")) + list((folder / "logs").glob(".launcher*"))
    # torch keeps its compiler's cache in the temporary folder.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def trained(group: int, folder: Path, seen: set[int], program: Program) -> dict[int, int]:
    """Waits until ranks that have not been killed yet have saved a step, and returns their processes."""
    wait_for(lambda: len(set(ranks_of(group).values()) - seen) == 2, 60, program.folder)
    ranks, before = ranks_of(group), last_save(folder)
    wait_for(lambda: last_save(folder) > before or not processes_of(group), 60, program.folder)
    return ranks


def last_save(folder: Path) -> int:
    """Returns when the last checkpoint was saved, in nanoseconds, or 0."""
    try:
        return (folder / "checkpoints" / "last.ckpt").lstat().st_mtime_ns
    except FileNotFoundError:
        return 0


def restarted(program: Program, count: int, seed: int) -> tuple[Path, int]:
    """Kills random ranks of a run that restarts, and returns its folder and the number of kills."""
    folder, drawn, kills = program.folder / "restarted", random.Random(seed), 0
    steps = max(60, 12 * count)
    words = (*SMALL, "--devices", 2, "--epochs", steps // 20, "--save-every", 1, "--keep", 3)
    with program.started(*words, "--max-restarts", count, "--run-dir", folder) as group:
        seen: set[int] = set()
        while kills < count:
            ranks = trained(group, folder, seen, program)
            time.sleep(drawn.random() / 4)
            seen |= set(ranks.values())
            kill(ranks[drawn.randrange(2)], signal.SIGKILL)
            kills += 1
        code, _ = wait_for_exit(group, program, 200)
    assert code == 0, read_errors(program)
    assert read_errors(program).count("Restarting all ranks.") == count
    return folder, steps // 20


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_a_run_that_is_killed_repeatedly_is_bit_identical(
    program: Program, record_metric: RecordMetric, count: int
) -> None:
    folder, epochs = restarted(program, count, seed=2)
    whole = program.train(*SMALL, "--devices", 2, "--epochs", epochs, timeout=400)
    for key in ("weights_sha256", "steps", "test", "validation"):
        assert result_of(folder)[key] == result_of(whole)[key]
    record_metric(
        "random kills with automatic resume", f"{count} kills, weights_sha256 equal to the uninterrupted run's"
    )


@pytest.mark.slow
def test_torchrun_restarts_from_the_newest_checkpoint(program: Program) -> None:
    folder = program.folder / "torchrun"
    process = torchrun(
        folder, *SMALL, "--save-every", 3, "--inject", "kill:rank=1,step=11", restarts=1, script=("train.py",)
    )
    try:
        assert process.wait(120) == 0, (program.folder / "torchrun.err").read_text()
    finally:
        for pid in named(folder):
            kill(pid, signal.SIGKILL)
        process.wait(5)
    whole = program.train(*SMALL, "--devices", 2)
    assert result_of(folder)["weights_sha256"] == result_of(whole)["weights_sha256"]


def test_a_restart_by_torchrun_requires_a_run_folder(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**environment, "TORCHELASTIC_MAX_RESTARTS": 2}.items():
        monkeypatch.setenv(name, str(value))
    done = program(*SMALL)
    assert done.code == 2
    assert "give --run-dir" in done.err


def test_faults_are_injected_at_the_requested_rank_and_step(program: Program) -> None:
    folder = program.folder / "run"
    words = (*SMALL, "--devices", 2, "--save-every", 4, "--run-dir", folder)
    done = program(*words, "--inject", "kill:rank=0,step=7", "--max-restarts", 1)
    assert done.code == 0, done.err
    assert re.search(r"Rank 0 \(process \d+ on \S+\) was killed by SIGKILL in step 7\.", done.err)
    assert json.loads((folder / "result.json").read_text())["steps"] == 20
    assert (folder / "logs" / "injected").exists()
