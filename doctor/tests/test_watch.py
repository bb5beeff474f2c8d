"""`ddp-doctor watch` finds faults that begin in the middle of a run, and never changes or ends it."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor_support import CHILD_ENV, ROOT
from projects.cases import PROJECTS, changed

from ddp_doctor.watch.comparison import WatchedRanks

# A loop of 500 steps, with a fault that begins in the middle if its name is given.
PROGRAM = """
~"gloo", rank=rank, world_size=world_size => "gloo"
~nn.ReLU() => nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1)
~make_dataset(96) => make_dataset(2000)
-loader = DataLoader(dataset, batch_size=8, sampler=sampler)
+import hashlib, sys
+fault, shared, step = sys.argv[1], sys.argv[1] == "samples", 0
+workers = int(os.environ.get("WORKERS", "0"))
+loader = DataLoader(dataset, 20, shared, None if shared else sampler, num_workers=workers)
-optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
-for epoch in range(2): ...
+optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
+for epoch in range(5 if shared else 10):
+    if fault != "order":
+        sampler.set_epoch(epoch)
+    if fault != "mode" or step < 240:
+        model.train()
+    for x, y in loader:
+        optimizer.zero_grad()
+        F.cross_entropy(model(x), y).backward()
+        if step == 240 and rank == 1 and fault == "weights":
+            net[0].weight.grad.mul_(1.001)
+        if step == 240 and rank == 1 and fault == "lr":
+            optimizer.param_groups[0]["lr"] *= 2
+        optimizer.step()
+        step += 1
+    # Every rank validates on the whole set, which is slow, but no fault.
+    with torch.no_grad():
+        model.eval()
+        for x, _ in DataLoader(dataset, 200):
+            model(x)
+if rank == 0:
+    print("weights", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WATCH = [sys.executable, "-m", "ddp_doctor", "watch"]


def program() -> Path:
    path = Path("train.py").absolute()
    path.write_text(changed((PROJECTS / "bases" / "loop.py").read_text(), PROGRAM))
    return path


def run(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**CHILD_ENV, **environment}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "codes", "step", "workers"),
    [
        # The step of the first record that shows the fault.
        ("weights", {"LD011"}, 250, "0"),
        ("lr", {"LD017", "LD011"}, 240, "0"),
        ("mode", {"LD021"}, 250, "0"),
        ("samples", {"LD002"}, None, "0"),
        ("samples", {"LD002"}, None, "2"),
        ("order", {"LD001"}, None, "2"),
    ],
)
def test_a_fault_that_begins_in_the_middle_is_found(
    fault: str, codes: set[str], step: int | None, workers: str, tmp_path: Path
) -> None:
    watched = run(*WATCH, "--records", tmp_path, "--", *TORCHRUN, program(), fault, WORKERS=workers)
    assert watched.returncode == 1, watched.stderr
    found = json.loads((tmp_path / "watch.json").read_text())["findings"]
    assert {finding["code"] for finding in found} == codes
    assert found[0]["step"] == step
    assert all(f"fault: {code}: " in watched.stderr for code in codes)
    assert fault != "weights" or found[0]["tensor"] == "0.weight"


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_healthy_run_is_not_accused_and_not_changed(workers: str) -> None:
    watched = run(*WATCH, "--", *TORCHRUN, program(), "none", WORKERS=workers)
    assert watched.returncode == 0, watched.stderr
    assert "no fault was seen" in watched.stderr
    alone = run(*TORCHRUN, program(), "none", WORKERS=workers)
    assert "weights" in alone.stdout
    assert alone.stdout == watched.stdout


def test_a_run_whose_records_cannot_be_written_ends_as_without_them() -> None:
    script = "import torch; w = torch.ones(2, requires_grad=True); o = torch.optim.SGD([w], 0.1); w.sum().backward()\n"
    script += "for _ in range(30): o.step()\nimport sys; assert 'ddp_doctor.watch.rank' in sys.modules; print(w.sum())"
    site = str(ROOT / "ddp_doctor" / "launch" / "site")
    done = run(sys.executable, "-c", script, DDP_DOCTOR_WATCH="/proc/none", PYTHONPATH=f"{site}:{ROOT}")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tensor(-4.0")


@pytest.mark.parametrize("words", ["", "--never -- true", "-- no-such-command", "--records /proc/x -- true"])
def test_a_wrong_request_is_rejected(words: str) -> None:
    done = run(*WATCH, *words.split())
    assert (done.returncode, done.stderr[:7], done.stderr.count("\n")) == (2, "error: ", 1)


def test_records_of_another_run_are_kept(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_text("{}\n")
    assert run(*WATCH, "--records", tmp_path, "--", "true").returncode == 2
    assert (tmp_path / "rank0.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize(("command", "code"), [("exit 7", 7), ("kill -9 $$", 137), ("true", 0)])
def test_the_exit_code_is_that_of_the_command(command: str, code: int) -> None:
    assert run(*WATCH, "--", "sh", "-c", command).returncode == code


def test_a_signal_reaches_the_command() -> None:
    script = "trap 'exit 3' TERM; echo ready; for n in $(seq 2000); do sleep 0.05; done"
    process = subprocess.Popen([*WATCH, "--", "sh", "-c", script], env=CHILD_ENV, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        # The command has set its trap, and the watch its handlers before it started the command.
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 3
    finally:
        process.kill()


def record(step: int, **changes: Any) -> str:
    values = {"optimizer": 0, "step": step, "lr": [0.1], "eval": False, "epochs": []}
    first = {"names": ["a", "b"], "wrapped": True, "sharded": False} if step == 0 else {}
    return json.dumps({**values, "weights": [1, 2], **first, **changes}) + "\n"


def ended(steps: int) -> str:
    return json.dumps({"end": "", "steps": [steps], "share": 0.0, "epochs": []}) + "\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (lambda rank: [record(10 * n, weights=[1, rank * (n > 1)]) for n in range(4)], {"LD011": "fault"}),
        (lambda rank: [record(10 * n, weights=[1, rank * n % 3]) for n in range(7)], {"LD011": "note"}),
        (lambda rank: [record(10 * n, weights=[1, rank], wrapped=False) for n in range(4)], {}),
        (lambda rank: [record(10 * n, weights=[1, rank], sharded=True) for n in range(4)], {}),
        (lambda rank: [record(10 * n, eval=True) for n in range(4)], {}),
        (lambda rank: [record(0), ended(30 - 10 * rank)], {"LD028": "fault"}),
        (lambda rank: [record(0), ended(30)], {}),
    ],
)
def test_the_records_of_the_ranks_are_compared(lines: Any, expected: dict[str, str], tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.jsonl").write_text("".join(lines(rank)))
    found = WatchedRanks(tmp_path).finish().findings
    assert {finding.code: finding.verdict.value for finding in found} == expected
