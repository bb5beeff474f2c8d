"""Precision is what was asked for: real float16 on a CPU, with a GradScaler whose skipped steps move no schedule."""

from __future__ import annotations

import pytest
import torch
from conftest import ROOT, Program, result_of, weights_of
from lightning.pytorch.plugins import MixedPrecision

from lit_mnist.experiment import ModelSettings
from lit_mnist.training.precision import cpu_computes_bfloat16, resolve_precision
from lit_mnist.training.schedule import rate_factor

SMALL = ("--data.train_size", 160, "--data.val_size", 0, "--data.test_size", 40, "--batch-size", 8)


def test_auto_is_what_the_device_is_good_at() -> None:
    assert resolve_precision("auto", "cuda") == "16-mixed"
    assert resolve_precision("auto", "cpu") == ("bf16-mixed" if cpu_computes_bfloat16() else "32-true")
    assert resolve_precision("16-mixed", "cpu") == "16-mixed"


def test_float16_on_a_cpu_is_float16_with_a_scaler(program: Program) -> None:
    folder = program.train(*SMALL, "--precision", "16-mixed", "--max-steps", 4)
    assert result_of(folder)["precision"] == "16-mixed"
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved[MixedPrecision.__qualname__]["scale"] > 0
    # Half precision rounds the products: the weights are others than in single precision.
    single = weights_of(program.train(*SMALL, "--precision", "32-true", "--max-steps", 4))
    half = weights_of(folder)
    assert half["net.fc.weight"].dtype == torch.float32
    assert not torch.equal(half["net.fc.weight"], single["net.fc.weight"])
    brain = weights_of(program.train(*SMALL, "--precision", "bf16-mixed", "--max-steps", 4))
    assert not torch.equal(half["net.fc.weight"], brain["net.fc.weight"])


@pytest.mark.parametrize(("scale", "all_skipped"), [(2.0**22, False), (2.0**40, True)])
def test_a_skipped_step_leaves_the_schedule_where_it_was(
    program: Program, monkeypatch: pytest.MonkeyPatch, scale: float, all_skipped: bool
) -> None:
    """A scale that is too large overflows float16: the scaler halves it at each step that it skips."""
    original, steps = torch.amp.GradScaler.__init__, 10

    def large(self: torch.amp.GradScaler, *args: object, **kwargs: object) -> None:
        original(self, *args, **{**kwargs, "init_scale": scale})  # type: ignore[arg-type]

    monkeypatch.setattr(torch.amp.GradScaler, "__init__", large)
    folder = program.train(*SMALL, "--precision", "16-mixed", "--max-steps", steps)
    result = result_of(folder)
    skipped = result["skipped_steps"]
    assert result["steps"] == steps
    assert skipped == steps if all_skipped else 0 < skipped < steps
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved[MixedPrecision.__qualname__]["scale"] == scale / 2**skipped
    assert saved["steps_made"] == steps - skipped
    assert saved["lr_schedulers"][0]["last_epoch"] == steps - skipped
    settings = ModelSettings()
    expected = settings.lr * rate_factor(settings, steps - skipped, steps)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(expected)


def test_the_gpu_configuration_runs_on_a_cpu_in_float16(program: Program) -> None:
    config = ROOT / "configs" / "gpu.yaml"
    folder = program.train("--config", config, "--devices", 2, "--trainer.accelerator", "cpu", "--max-steps", 4, *SMALL)
    result = result_of(folder)
    assert result["precision"] == "16-mixed"
    assert result["steps"] == 4
    assert result["config"]["trainer"]["sync_batchnorm"] is True
