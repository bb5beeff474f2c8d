"""`ddp-doctor watch` finds faults that begin in the middle of a run, and never changes or ends it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from doctor_support import CHILD_ENV

from ddp_doctor.watch.comparison import Comparison
from ddp_doctor.watch.rank import MOST_GROUPS, digests, is_whole

PROGRAM = Path(__file__).with_name("watched_programs.py")
STEPS = 500
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WATCH = [sys.executable, "-m", "ddp_doctor", "watch"]
# The codes, and the step of the first record that shows the fault.
FAULTS = {
    "weights": ({"LD011"}, 250),
    "lr": ({"LD017", "LD011"}, 240),
    "gradient": ({"LD009"}, 260),
    "mode": ({"LD021"}, 250),
    "samples": ({"LD002"}, None),
    "order": ({"LD001"}, None),
}


def run(*words: str | Path, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**CHILD_ENV, **(environment or {})}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=180, check=False)


def weights(output: str) -> str:
    return next(line for line in output.splitlines() if line.startswith("weights"))


@pytest.mark.slow
def test_a_fault_that_begins_in_the_middle_is_found_and_the_weights_stay(tmp_path: Path) -> None:
    records = tmp_path / "records"
    watched = run(*WATCH, "--records", records, "--", *TORCHRUN, PROGRAM, "weights", str(STEPS))
    assert watched.returncode == 1, watched.stderr
    found = json.loads((records / "watch.json").read_text())["findings"]
    assert [(finding["code"], finding["step"], finding["tensor"]) for finding in found] == [("LD011", 250, "0.weight")]
    assert "LD011" in watched.stderr
    alone = run(*TORCHRUN, PROGRAM, "weights", str(STEPS))
    assert weights(watched.stdout) == weights(alone.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault: str, workers: int, tmp_path: Path) -> None:
    watched = run(
        *(*WATCH, "--records", tmp_path, "--", *TORCHRUN, PROGRAM, fault, str(STEPS)),
        environment={"WORKERS": str(workers)},
    )
    codes, step = FAULTS[fault]
    assert watched.returncode == 1, watched.stderr
    faults = [f for f in json.loads((tmp_path / "watch.json").read_text())["findings"] if f["verdict"] == "fault"]
    assert {finding["code"] for finding in faults} == codes
    assert step is None or faults[0]["step"] == step


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_healthy_run_is_not_accused(workers: int) -> None:
    watched = run(*WATCH, "--", *TORCHRUN, PROGRAM, "none", str(STEPS), environment={"WORKERS": str(workers)})
    assert watched.returncode == 0, watched.stderr
    assert "2 ranks were compared 50 times in 490 optimizer steps" in watched.stderr
    assert "no fault was seen" in watched.stderr


@pytest.mark.slow
def test_equal_random_numbers_are_a_note(tmp_path: Path) -> None:
    watched = run(*WATCH, "--records", tmp_path, "--", *TORCHRUN, PROGRAM, "random", str(STEPS))
    assert watched.returncode == 0, watched.stderr
    found = json.loads((tmp_path / "watch.json").read_text())["findings"]
    assert [(finding["code"], finding["verdict"]) for finding in found] == [("LD008", "note")]


@pytest.mark.slow
def test_one_line_watches_a_loop(tmp_path: Path) -> None:
    done = run(*TORCHRUN, PROGRAM, "weights", str(STEPS), tmp_path / "new")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "new" / "watch.json").read_text())["findings"]
    assert [finding["code"] for finding in found] == ["LD011"]
    assert "LD011" in done.stderr


@pytest.mark.slow
def test_a_run_whose_records_cannot_be_written_ends_as_without_them(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run(*TORCHRUN, PROGRAM, "none", "60", tmp_path / "file" / "folder")
    assert done.returncode == 0, done.stderr
    assert weights(done.stdout) == weights(run(*TORCHRUN, PROGRAM, "none", "60").stdout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["watch"], "the command that trains is missing"),
        (["watch", "--every", "0", "--", "true"], "at least one step"),
        (["watch", "--never", "--", "true"], "unrecognized arguments: --never"),
        (["watch", "--", "no-such-command"], "no-such-command: No such file or directory"),
        (["watch", "--records", "/proc/x", "--", "true"], "--records /proc/x"),
    ],
)
def test_a_wrong_request_is_rejected(words: list[str], message: str) -> None:
    done = run(sys.executable, "-m", "ddp_doctor", *words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr


def test_records_of_another_run_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text("{}\n")
    done = run(*WATCH, "--records", tmp_path, "--", "true")
    assert done.returncode == 2
    assert (tmp_path / "rank0.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_the_exit_code_is_that_of_the_command(command: str, code: int) -> None:
    assert run(*WATCH, "--", "sh", "-c", command).returncode == code


def test_a_signal_reaches_the_command() -> None:
    script = "trap 'echo stopped; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    process = subprocess.Popen([*WATCH, "--", "sh", "-c", script], env=CHILD_ENV, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopped\n"
        assert process.wait(timeout=30) == 3
    finally:
        process.kill()
        process.wait()


def test_a_digest_changes_with_every_bit_of_a_tensor() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64):
        tensor = torch.ones(7, 3).to(dtype)
        other = tensor.clone()
        other.view(torch.uint8)[-1, -1] ^= 1
        assert not torch.equal(digests([tensor]), digests([other])), dtype
    transposed = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(digests([transposed]), digests([transposed.contiguous()]))
    assert torch.equal(digests([torch.empty(0)]), torch.zeros(1, dtype=torch.int64))


def test_many_tensors_share_digests_and_an_exchange_is_seen() -> None:
    tensors = [torch.full((2,), float(number)) for number in range(3 * MOST_GROUPS + 1)]
    before = digests(tensors)
    assert len(before) <= MOST_GROUPS
    tensors[0], tensors[1] = tensors[1], tensors[0]
    assert not torch.equal(before, digests(tensors))


def test_a_sparse_tensor_and_one_without_values_are_not_compared() -> None:
    assert is_whole(torch.nn.Parameter(torch.ones(2)))
    assert not is_whole(torch.ones(2).to_sparse())
    assert not is_whole(torch.ones(2, device="meta"))


def record(step: int, **changes: object) -> str:
    values = {
        "optimizer": 0,
        "step": step,
        "lr": [0.1],
        "lost": [],
        "random": str(step),
        "averaged": False,
        "eval": False,
    }
    first = {"names": ["a", "b"], "wrapped": True, "sharded": False, "group": 1} if step == 0 else {}
    return json.dumps({**values, "weights": [1, 2], **first, **changes}) + "\n"


def verdicts(folder: Path) -> list[tuple[str, str]]:
    comparison = Comparison(folder)
    return [(finding.code, finding.verdict.value) for finding in comparison.finish().findings]


def test_weights_that_are_averaged_from_time_to_time_are_no_fault(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [record(10 * n, weights=[1, rank if n % 3 else 0], random=f"{rank}{n}") for n in range(7)]
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(lines))
    assert verdicts(tmp_path) == [("LD011", "note")]


def test_ranks_that_hold_parts_of_one_model_are_no_fault(tmp_path: Path) -> None:
    for rank in (0, 1):
        lines = [record(10 * n, weights=[1, rank], random=f"{rank}{n}", wrapped=False) for n in range(4)]
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(lines))
    assert verdicts(tmp_path) == []


def test_records_are_compared_as_they_arrive_and_half_a_line_waits(tmp_path: Path) -> None:
    told: list[str] = []
    comparison = Comparison(tmp_path, lambda finding: told.append(finding.code))
    (tmp_path / "rank0.jsonl").write_text(record(0, random="a") + record(10, random="b"))
    (tmp_path / "rank1.jsonl").write_text(record(0, random="c") + record(10, lr=[0.2], random="d")[:-20])
    comparison.read()
    assert (told, comparison.compared) == ([], 1)
    with (tmp_path / "rank1.jsonl").open("a") as file:
        file.write(record(10, lr=[0.2], random="d")[-20:])
    comparison.read()
    comparison.read()
    assert (told, comparison.compared) == (["LD017"], 2)


def test_ranks_that_end_at_different_steps_are_found(tmp_path: Path) -> None:
    for rank, steps in ((0, 30), (1, 20)):
        lines = [record(10 * n, random=f"{rank}{n}") for n in range(steps // 10)]
        end = json.dumps({"end": "", "steps": [steps], "share": 0.0}) + "\n"
        (tmp_path / f"rank{rank}.jsonl").write_text("".join([*lines, end]))
    assert verdicts(tmp_path) == [("LD028", "fault")]
