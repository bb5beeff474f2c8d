"""Precision is what was asked for: real float16 on a CPU, with a GradScaler whose skipped steps move no schedule."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, Program, result_of, weights_of
from lightning.pytorch.plugins import MixedPrecision

from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.precision import has_fast_bfloat16, resolve_precision
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import NonFiniteError
from lit_mnist.experiment import ModelSettings
from lit_mnist.experiment.learning_rate import peak_lr
from lit_mnist.run import finite
from lit_mnist.run.finite import FiniteCheck
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.schedule import lr_factor

SMALL = (
    *("--data.train_size", 160, "--data.val_size", 0, "--data.test_size", 40, "--batch-size", 8),
    *("--run.threads", 1),
)


def test_auto_is_what_the_device_is_good_at() -> None:
    fast = has_fast_bfloat16(Path("/proc/cpuinfo").read_text())
    assert resolve_precision("auto", "cuda") == "16-mixed"
    assert resolve_precision("auto", "cpu") == ("bf16-mixed" if fast else "32-true")
    assert resolve_precision("16-mixed", "cpu") == "16-mixed"


@pytest.mark.parametrize(
    ("processor", "is_fast"),
    [
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f avx512_bf16 amx_tile amx_bf16", True),
        # AMX is masked in many virtual machines.
        ("vendor_id\t: GenuineIntel\nflags\t\t: fpu avx512f avx512_bf16", False),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx512f avx512_bf16", True),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2", False),
        ("CPU implementer\t: 0x41\nFeatures\t: fp asimd bf16", True),
        ("CPU implementer\t: 0x41\nFeatures\t: fp asimd", False),
        ("", False),
    ],
)
def test_bfloat16_is_fast_only_with_the_right_instructions(processor: str, is_fast: bool) -> None:
    cores = [f"processor\t: {number}\n{processor}\npower management:\n" for number in range(2)]
    assert has_fast_bfloat16("\n".join(cores)) == is_fast


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
    expected = peak_lr(settings, 1, steps) * lr_factor(settings, steps - skipped, steps)
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] == pytest.approx(expected)


def test_the_gpu_configuration_runs_on_a_cpu_in_float16(program: Program) -> None:
    config = ROOT / "configs" / "gpu.yaml"
    folder = program.train("--config", config, "--devices", 2, "--trainer.accelerator", "cpu", "--max-steps", 4, *SMALL)
    result = result_of(folder)
    assert result["precision"] == "16-mixed"
    assert result["steps"] == 4
    assert result["config"]["trainer"]["sync_batchnorm"] is True


class Overflowing(torch.autograd.Function):
    """Gives a gradient that is infinite, of a loss that is finite."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * torch.inf


NEVER_FINITE = [
    ("lightning", "lit_mnist.training.classifier", 2, 17, "0.5"),
    pytest.param("raw_ddp", "lit_mnist.engines.raw_ddp", 2, 17, "0.5", marks=pytest.mark.slow),
    # As on a GPU: with the metrics of the epoch's end, and before anything is saved.
    ("raw_ddp", "lit_mnist.engines.raw_ddp", 2, 20, "0.0625"),
    pytest.param("single", "lit_mnist.engines.single", 1, 17, "0.5", marks=pytest.mark.slow),
    pytest.param("fabric", "lit_mnist.engines.fabric", 2, 17, "0.5", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "module", "devices", "step", "scale"), NEVER_FINITE)
def test_a_gradient_that_is_never_finite_ends_the_run(
    program: Program, monkeypatch: pytest.MonkeyPatch, engine: str, module: str, devices: int, step: int, scale: str
) -> None:
    """The scaler halves its scale, 65,536 at first, at each step that it skips: the 17th leaves less than 1."""
    if step == 20:
        monkeypatch.setattr(finite, "SYNCHRONOUS_DEVICES", frozenset())

    def overflowing(logits: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        return mean_loss(Overflowing.apply(logits), *arguments, **named)

    monkeypatch.setattr(f"{module}.mean_loss", overflowing)
    folder = program.folder / "run"
    words = (*SMALL, "--devices", devices, "--precision", "16-mixed", "--epochs", 2, "--run-dir", folder)
    done = program(*words, engine=engine)
    assert done.code == 4, done.out + done.err
    told = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(told) == 1
    assert told[0] == (
        f"error: The gradient was not finite in float16 in the last {step} steps, up to step {step}, and the scale of "
        f"the loss has fallen to {scale}: lower --lr, or use --precision bf16-mixed or 32-true."
    )
    assert "Traceback" not in done.err
    assert not (folder / "result.json").exists()
    assert not list(folder.glob("checkpoints/*.ckpt"))
    # All ranks end at the same step, each by itself.
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(devices)]
    assert all(f"up to step {step}," in log for log in logs)


def test_thirty_skipped_steps_in_a_row_end_the_run_and_fewer_do_not() -> None:
    job: Any = SimpleNamespace(precision="16-mixed", devices=Devices("cpu", (0,)))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    check = FiniteCheck(job, Rank())
    for step in range(1, 200):
        if step % 30:
            check.on_step_skipped(step, scaler)
    for step in range(201, 230):
        check.on_step_skipped(step, scaler)
    with pytest.raises(NonFiniteError, match=r"in the last 30 steps, up to step 230, .* fallen to 1\.26765e\+30:"):
        check.on_step_skipped(230, scaler)
