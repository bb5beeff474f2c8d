"""A run of a few steps learns, and its lower peak is stated; a longer run has the whole learning rate."""

from __future__ import annotations

import pytest
from conftest import Program, result_of

from lit_mnist.experiment import ModelSettings
from lit_mnist.experiment.learning_rate import explain_peak, peak_lr

CPU = ("--precision", "32-true", "--run.threads", 1, "--data.test_size", 2000, "--data.val_size", 0)


@pytest.mark.parametrize(
    ("steps", "devices", "least"),
    [(30, 2, 0.7), pytest.param(10, 1, 0.5, marks=pytest.mark.slow), pytest.param(60, 1, 0.9, marks=pytest.mark.slow)],
)
def test_a_run_of_a_few_steps_learns(program: Program, steps: int, devices: int, least: float) -> None:
    """With the whole learning rate, 30 steps ended with 10 % and a loss above that of the start."""
    folder = program.folder / "run"
    done = program("--max-steps", steps, "--devices", devices, *CPU, "--run-dir", folder)
    assert done.code == 0, done.err
    peak = 0.1 * steps / 240
    assert done.out.count(f"note: the learning rate rises to {peak:.4g} instead of 0.1") == 1
    result = result_of(folder)
    assert result["test"]["accuracy"] >= least
    assert result["train"]["lr"] == pytest.approx(peak)


@pytest.mark.parametrize(
    ("settings", "steps", "peak"),
    [
        ({}, 240, 0.1),
        ({}, 859, 0.1),
        ({}, 120, 0.05),
        ({}, 1, 0.1 / 240),
        ({}, 239, 0.1 * 239 / 240),
        ({"lr": 0.4}, 239, 0.4),
        ({"lr": 0.05}, 30, 0.05),
        ({"momentum": 0.0, "nesterov": False}, 30, 0.1),
        ({"optimizer": "adam"}, 3, 0.1),
        ({"schedule": "constant"}, 3, 0.1),
        ({"schedule": "cosine"}, 3, 0.1),
    ],
)
def test_the_peak_grows_with_the_number_of_steps(settings: dict[str, float], steps: int, peak: float) -> None:
    model = ModelSettings(**settings)  # type: ignore[arg-type]
    assert peak_lr(model, 1, steps) == pytest.approx(peak, rel=1e-12)
    # A peak that is not lowered is bit-identical.
    assert (peak_lr(model, 1, steps) == model.lr) == (explain_peak(model, 1, steps) == "")
