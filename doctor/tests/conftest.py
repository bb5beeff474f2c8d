"""Fixtures of the doctor's tests: the command `ddp-doctor` in a forked process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from doctor_support import Done, run_forked

from ddp_doctor.command import main

# Tests use the CPU even if there are GPUs, and what a machine says of its terminal must not decide what they see.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for _name in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES"):
    os.environ.pop(_name, None)

# This process must not start OpenMP threads, since the tests fork it.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets no test write into the folder in which pytest was started."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def doctor(tmp_path: Path) -> Callable[..., Done]:
    """`doctor(*words, timeout=280)`: runs `ddp-doctor WORDS` in the test's folder."""

    def run(*words: str, timeout: float = 280) -> Done:
        return run_forked(lambda: main(words), tmp_path, timeout)

    return run
