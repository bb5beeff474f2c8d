"""Two ranks train what one rank trains, and the test metrics do not depend on the number of ranks."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def run(folder: Path, *options: str) -> dict[str, float]:
    """Runs train.py, and returns the test metrics."""
    subprocess.run([sys.executable, "train.py", "--folder", str(folder), *options], cwd=ROOT, check=True, timeout=300)
    with (folder / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    return {name: float(value) for name, value in last.items() if name.startswith("test_")}


def test_two_ranks_train_the_weights_of_one(tmp_path: Path) -> None:
    weights = []
    for devices in "12":
        run(tmp_path / devices, "--devices", devices, "--epochs", "2")
        checkpoint = torch.load(tmp_path / devices / "checkpoints" / "last.ckpt", weights_only=True)
        weights.append(checkpoint["state_dict"])
    # The ranks add up the same numbers in another order.
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)

    trained = str(tmp_path / "1" / "checkpoints" / "last.ckpt")
    one, two, three = (run(tmp_path / f"test-{devices}", "--devices", devices, "--test", trained) for devices in "123")
    # A sample that is missing, or counts twice, changes a metric by more than the rounding of its sum.
    assert one
    assert two == pytest.approx(one, rel=1e-5)
    assert three == pytest.approx(one, rel=1e-5)
