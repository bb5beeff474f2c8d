"""Each odd program gets a verdict or one message, and leaves no process and no file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from doctor_support import CHILD_ENV
from snapshots import descendants, snapshot, wait_for_end

import ddp_doctor
from ddp_doctor import Report, examine
from ddp_doctor.errors import InputError

PROGRAMS = Path(__file__).with_name("odd_programs.py")


def examined(name: str, **options: float) -> Report:
    return examine(f"{PROGRAMS}:{name}", **{"timeout": 30, **options})  # type: ignore[arg-type]


def sleeping() -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", b"4567"]:
                found.append(entry.name)
    return found


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with what the program `saves` overwrites; the doctor's own folder is beside it."""
    for folder in ("work/old", "temporary"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("model.pt", "best.pt", "mine.txt", "old/a"):
        (tmp_path / "work" / name).write_text("a week of training")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "work"


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("hangs", 3, ["Rank 1 waited or hung in step 1", "in wait", "Rank 0"]),
        ("hangs_alone", 3, ["hangs_alone"]),
        ("dies", 3, ["Rank 1 exited with code 9"]),
        ("fails_on_rank_1", 3, ["ValueError: no data for rank 1"]),
        # What fails on one process already shows its own traceback.
        ("exits", 2, ["SystemExit: 3"]),
    ],
)
def test_a_program_that_does_not_end_well_is_reported(name: str, code: int, said: list[str]) -> None:
    report = examined(name)
    assert report.exit_code == code
    assert all(text in (report.hang or report.error) for text in said), report.hang + report.error
    assert str(Path(ddp_doctor.__file__).parent) not in report.error


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("is_not_deterministic", "different weights"),
        ("has_no_64_bits", "in 32 bits"),
        ("counts_its_samples", "whole epochs"),
    ],
)
def test_what_an_odd_program_needs_is_no_fault(name: str, said: str, work: Path) -> None:
    report = examined(name)
    assert (report.faults, report.error, report.hang) == ([], "", "")
    assert any(said in stage.outcome for stage in report.stages)
    assert name == "is_not_deterministic" or (report.comparison and report.comparison.made)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("program", [pytest.param("starts_processes", marks=pytest.mark.slow), "saves"])
def test_no_process_and_no_file_is_left(program: str, work: Path) -> None:
    before = snapshot(work)
    report = examined(program)
    assert (report.faults, report.error, report.hang) == ([], "", "")
    assert report.files.protection
    assert not sleeping()
    assert snapshot(work) == before
    assert not list(Path(tempfile.gettempdir()).iterdir())


@pytest.mark.timeout(200)
def test_a_doctor_that_is_killed_changes_nothing(work: Path) -> None:
    before, temporary = snapshot(work), Path(tempfile.gettempdir())
    environment = {**CHILD_ENV, "TMPDIR": str(temporary), "WAIT": "1000"}
    code = f"from ddp_doctor import examine; examine({f'{PROGRAMS}:saves'!r}, timeout=1000)"
    doctor = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        while not any(temporary.glob(str(Path("ddp-doctor-*", "layers*", "**", "work", "new")))):
            assert doctor.poll() is None
            time.sleep(0.1)
        processes = descendants(doctor.pid)
    finally:
        doctor.kill()
        doctor.wait()
    wait_for_end(processes)
    assert snapshot(work) == before


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("name", "said"),
    [("does_nothing", "without training"), ("takes_three", r"takes_three\(a, b, c\)"), ("missing", "has no missing")],
)
def test_a_wrong_target_is_rejected(name: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        examined(name)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_launcher_that_starts_one_process_of_two_is_named(tmp_path: Path) -> None:
    """The rank that was never started has recorded nothing, and the doctor has waited for it."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n"
        "    for (x,) in DataLoader(TensorDataset(torch.randn(16, 3)), 4):\n"
        "        model(x).sum().backward()\n"
        "        optimizer.step()\n"
    )
    (tmp_path / "launch.sh").write_text('#!/bin/sh\nexec "$1" train.py\n')
    command = [sys.executable, "-m", "ddp_doctor", "--timeout", "15", "--", "sh", "launch.sh", sys.executable]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert "trained on one process and joined no process group" in done.stderr
    assert done.returncode == 2
