"""ExactCheckpoint: trainings of any module are killed, resumed, and end as if nothing had happened."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from killed_runs import Training, assert_resumes
from modules import MODULES

# Batches over all epochs, of which each module has 16 per epoch on one rank and 8 on two.
KILLS = [1, 4, 9, 15, 16, 18, 23, 31, 33, 46]
KILLS_ON_TWO = [2, 8, 21]


def _training(name: str, tmp_path: Path, world_size: int) -> Training:
    if name == "gpt2" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed (the extra `engines`)")
    options: dict[str, Any] = {"val_check_interval": 5} if name == "autoencoder" else {}
    # The GAN has a gradient to restore only after each second batch.
    every = 1 if name == "gan" else 3
    return Training(MODULES[name], tmp_path / "run", world_size, every, options)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in {"gpt2", "autoencoder", "two_optimizers"} else name
        for name in MODULES
        if name != "stream_with_workers"
    ],
)
def test_a_training_killed_at_any_step_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    """One training is killed at ten steps, each time after it was resumed."""
    training = _training(name, tmp_path, 1)
    assert_resumes(training, training.complete(), KILLS)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", [name for name in MODULES if name != "stream_with_workers"])
def test_a_training_killed_once_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    """Ten trainings are killed at one step each."""
    training = _training(name, tmp_path, 1)
    assert_resumes(training, training.complete(), KILLS, alone=True)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "name",
    [
        # `make test` kills the GAN, the one with metrics and a stream on one rank.
        name if name == "stream_with_workers" else pytest.param(name, marks=pytest.mark.slow)
        for name in MODULES
        if name != "stream"
    ],
)
def test_a_training_on_two_ranks_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    training = _training(name, tmp_path, 2)
    assert_resumes(training, training.complete(), KILLS_ON_TWO)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_a_training_on_two_ranks_killed_at_ten_steps_resumes_bit_identically(name: str, tmp_path: Path) -> None:
    training = _training(name, tmp_path, 2)
    assert_resumes(training, training.complete(), [1, 3, 5, 7, 8, 10, 14, 16, 19, 23], alone=True)
