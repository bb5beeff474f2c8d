"""The choice of the precision, and real float16 on CPUs."""

import platform
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.plugins import DoublePrecision, MixedPrecision, Precision

PrecisionName = Literal["32-true", "64-true", "16-mixed", "bf16-mixed"]

_AUTOCAST_DTYPE = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
# The key of a GradScaler's state in a checkpoint that was saved on a GPU.
_SCALER_KEY = MixedPrecision.__qualname__


class Float16OnCPU(MixedPrecision):
    """Mixed precision with float16 and a GradScaler on CPUs.

    Without it, `Trainer(precision="16-mixed")` computes in bfloat16 on a CPU, with a warning. With it, a float16 recipe
    can be tested on a machine without a GPU, and a run that was saved on one kind of device resumes on the other:

        trainer = Trainer(accelerator="cpu", plugins=[Float16OnCPU()])

    Args:
        **scaler: Arguments of `torch.amp.GradScaler`, such as `init_scale`.
    """

    def __init__(self, **scaler: Any) -> None:
        super().__init__("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", **scaler))

    def state_dict(self) -> dict[str, Any]:
        """Returns nothing, since Lightning would save it under the name of this class."""
        return {}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Saves the state of the scaler under the name that it has on GPUs."""
        checkpoint[_SCALER_KEY] = super().state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores it; a checkpoint of a run in another precision has none."""
        if state := checkpoint.get(_SCALER_KEY):
            self.load_state_dict(state)


def resolve_precision(precision: PrecisionName | Literal["auto"], device_type: str) -> tuple[PrecisionName, str]:
    """Returns the precision to use on `cpu` or `cuda`, and one line that says why."""
    if precision != "auto":
        return precision, f"precision {precision}: it was requested"
    if device_type == "cuda":
        return "16-mixed", "precision 16-mixed: the device is a GPU"
    if _has_fast_bfloat16():
        return "bf16-mixed", "precision bf16-mixed: this CPU has fast bfloat16 instructions"
    return "32-true", "precision 32-true: this CPU has no fast bfloat16 instructions"


def precision_plugin(precision: PrecisionName, device_type: str) -> Precision:
    """Returns Lightning's plugin for a precision; 16-mixed is float16 with a GradScaler, also on CPUs."""
    if precision == "16-mixed" and device_type == "cpu":
        return Float16OnCPU()
    if precision == "16-mixed" or precision == "bf16-mixed":  # noqa: PLR1714 - mypy does not narrow a set's members
        return MixedPrecision(precision, device_type)
    return DoublePrecision() if precision == "64-true" else Precision()


def autocast(precision: PrecisionName, device_type: str) -> torch.autocast:
    """Returns the context of the forward pass in a hand-written loop. As in Lightning, casts are not cached."""
    dtype = _AUTOCAST_DTYPE.get(precision)
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


def needs_scaler(precision: PrecisionName) -> bool:
    """Returns whether the loss must be scaled, because small gradients would underflow (Micikevicius et al., 2018)."""
    return precision == "16-mixed"


def _has_fast_bfloat16() -> bool:
    """Returns whether bfloat16 is faster than float32 on this CPU.

    On Intel's CPUs only AMX is: with AVX512_BF16 alone, convolutions took twice as long as in float32.
    """
    cpuinfo = Path("/proc/cpuinfo")
    if platform.system() != "Linux" or not cpuinfo.exists():
        return False
    words = set(cpuinfo.read_text().split())
    return bool(words & ({"amx_bf16"} if "GenuineIntel" in words else {"amx_bf16", "avx512_bf16", "bf16"}))
