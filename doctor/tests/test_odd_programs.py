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
from ddp_doctor.files.temporary import examination_folder

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
def test_a_rank_that_hangs_is_reported_with_its_stack() -> None:
    report = examined("hangs", timeout=15)
    assert report.exit_code == 3
    assert "Rank 1 waited or hung in step 1" in report.hang, report.hang
    assert "in wait" in report.hang
    assert "Rank 0" in report.hang


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_process_that_hangs_alone_is_reported() -> None:
    report = examined("hangs_alone", timeout=8)
    assert (report.exit_code, "hangs_alone" in report.hang) == (3, True)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_numbers_of_a_program_that_is_not_deterministic_are_not_compared() -> None:
    report = examined("is_not_deterministic")
    assert not report.faults
    assert any("different weights" in stage.outcome for stage in report.stages)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_program_without_64_bits_is_compared_in_32() -> None:
    report = examined("has_no_64_bits")
    assert not report.faults
    assert any("in 32 bits" in stage.outcome for stage in report.stages)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_program_that_counts_its_samples_is_run_with_whole_epochs() -> None:
    report = examined("counts_its_samples")
    assert (report.faults, report.error, report.hang) == ([], "", "")
    assert "whole epochs" in report.stages[0].outcome
    assert report.comparison is not None
    assert report.comparison.made


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_one_rank_alone_decides_before_training_is_no_fault(work: Path) -> None:
    report = examined("names_its_folder")
    assert (report.faults, report.error, report.hang) == ([], "", "")
    assert report.comparison is not None
    assert report.comparison.made


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(("name", "said"), [("exits", "SystemExit: 3")])
def test_what_fails_on_one_process_already_shows_its_own_traceback(name: str, said: str) -> None:
    report = examined(name)
    assert report.exit_code == 2
    assert said in report.error
    assert str(Path(ddp_doctor.__file__).parent) not in report.error


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "said"), [("dies", "Rank 1 exited with code 9"), ("fails_on_rank_1", "ValueError: no data for rank 1")]
)
def test_a_lost_rank_is_reported(name: str, said: str) -> None:
    report = examined(name)
    assert report.exit_code == 3
    assert said in report.hang


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
def test_a_doctor_that_is_killed_changes_nothing_and_the_next_removes_its_folder(work: Path) -> None:
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
    assert len(list(temporary.iterdir())) == 1
    with examination_folder() as folder:
        assert list(temporary.iterdir()) == [folder]


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
