"""The training has none of the known silent faults of distributed training, and equals that of one process."""

from pathlib import Path

import pytest

doctor = pytest.importorskip("ddp_doctor.pytest", reason="ddp-doctor is not installed")
ROOT = Path(__file__).parents[1]


def test_the_training_has_no_silent_fault(tmp_path: Path) -> None:
    command = f"torchrun --standalone --nproc-per-node 2 train.py --folder {tmp_path}"
    report = doctor.examine_command(command, cwd=ROOT, timeout=300)
    assert report.comparison.made, report.comparison.reason
