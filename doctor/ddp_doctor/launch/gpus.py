"""Prepares torch in a process of the examined program: with emulated GPUs, or as it is.

The emulation is imported only where it is needed.
"""

from __future__ import annotations

import os
from pathlib import Path

from ddp_doctor.records.spec import Spec


def visible_gpus() -> str:
    """Returns the value of CUDA_VISIBLE_DEVICES with which a process sees the GPUs that this one sees."""
    import torch

    return os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))


def device_changes(devices: int, gpu_as_cpu: bool | None, available: int) -> dict[str, int | bool]:
    """Returns the fields of a specification that say where code for GPUs is run.

    Args:
        devices: Number of ranks.
        gpu_as_cpu: Whether GPUs are emulated; None to do so if the code needs one and the machine has too few. False
            also lets ranks share the GPUs of a machine that has fewer than ranks.
        available: Number of GPUs of the machine.
    """
    enough = available >= devices or (gpu_as_cpu is False and available > 0)
    if gpu_as_cpu is not True and enough:
        return {"real_gpus": True}
    return {"gpus": devices if gpu_as_cpu else 0, "may_emulate": gpu_as_cpu is not False}


def emulate(spec: Spec) -> None:
    """Emulates the GPUs of a specification, before anything else is installed."""
    if spec.gpus:
        from ddp_doctor.emulation.install import install

        install(spec.gpus)


def watch(folder: Path, spec: Spec) -> None:
    """Observes whether the program needs a GPU, if none is emulated.

    Args:
        folder: Folder of the run.
        spec: The run.
    """
    if not spec.gpus:
        from ddp_doctor.emulation import demand

        demand.watch(folder, spec)
