"""Two ranks train what one rank trains, and the test metrics do not depend on the number of ranks."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(folder: Path, *flags: str) -> dict[str, float]:
    """Runs train.py, and returns the test metrics."""
    command = [sys.executable, "train.py", "--folder", str(folder), *flags]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    [path] = folder.rglob("metrics.csv")
    last = list(csv.DictReader(path.open()))[-1]
    return {name: float(value) for name, value in last.items() if name.startswith("test_")}


def test_two_ranks_train_the_weights_of_one(tmp_path: Path) -> None:
    weights = []
    for devices in "12":
        folder = tmp_path / devices
        run(folder, "--devices", devices, "--epochs", "2")
        weights.append(torch.load(folder / "last.ckpt", weights_only=True)["state_dict"])
    # The ranks add up the same numbers in another order.
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)

    trained = str(tmp_path / "1" / "last.ckpt")
    metrics = [run(tmp_path / f"test-{devices}", "--devices", devices, "--test", trained) for devices in "123"]
    # A sample that is missing, or counts twice, changes a metric by more than the rounding of its sum.
    assert metrics[0]
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
    assert metrics[2] == pytest.approx(metrics[0], rel=1e-5)
