"""What holds for all tests of the doctor."""

import os
from pathlib import Path

import pytest
import torch

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
