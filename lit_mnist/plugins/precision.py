"""Real float16 on CPUs, which Lightning's own options do not offer."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision

from lit_mnist.distributed.precision import UsedPrecision, needs_scaler
from lit_mnist.errors import InputError
from lit_mnist.plugins.not_callbacks import NotACallback


class Float16OnCPU(MixedPrecision, NotACallback):
    """Mixed precision with float16 and a GradScaler on CPUs.

    On a CPU, `Trainer(precision="16-mixed")` computes in bfloat16 instead, with a warning. This plugin computes what
    the same training computes on GPUs, for tests of a float16 recipe on a machine without one:

        trainer = Trainer(accelerator="cpu", plugins=[Float16OnCPU()])

    A step whose gradient overflows is skipped, and the scale is halved. Clipping, accumulation and manual optimization
    work as with Lightning's plugin. The state of the scaler is in the checkpoint, under the same name as on GPUs, so
    that a run can resume on the other kind of device. Lightning also advances learning-rate schedules in skipped steps.

    Args:
        **scaler: Arguments of `torch.amp.GradScaler`, such as `init_scale`.
    """

    def __init__(self, **scaler: Any) -> None:
        super().__init__("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", **scaler))

    def pre_backward(self, tensor: torch.Tensor, module: LightningModule) -> torch.Tensor:  # type: ignore[override]
        """Scales the loss.

        Raises:
            InputError: The loss is not on a CPU, where autocast for CPUs has no effect.
        """
        if tensor.device.type != "cpu":
            raise InputError(f"Float16OnCPU was used on {tensor.device}: use Trainer(precision='16-mixed') there.")
        return super().pre_backward(tensor, module)


# Lightning saves the state of a plugin under this name.
Float16OnCPU.__qualname__ = MixedPrecision.__qualname__


def precision_plugin(precision: UsedPrecision, device_type: str) -> Precision:
    """Returns the plugin for a precision. 16-mixed is float16 with a GradScaler, even on CPUs."""
    if precision == "64-true":
        return DoublePrecision()
    if precision == "32-true":
        return Precision()
    if needs_scaler(precision) and device_type == "cpu":
        return Float16OnCPU()
    assert precision == "bf16-mixed" or needs_scaler(precision)
    return MixedPrecision(precision, device=device_type)
