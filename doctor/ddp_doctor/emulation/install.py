"""Installs the emulation in this process."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_doctor.emulation.apex import install_apex
from ddp_doctor.emulation.compilation import install_compilation
from ddp_doctor.emulation.cuda_module import install_cuda
from ddp_doctor.emulation.devices import gpus, install_devices
from ddp_doctor.emulation.factories import install_factories, install_generator
from ddp_doctor.emulation.generators import install_module_draws
from ddp_doctor.emulation.precision import install_precision
from ddp_doctor.emulation.process_groups import install_process_groups
from ddp_doctor.emulation.synchronized_norm import install_synchronized_norm
from ddp_doctor.emulation.torch_internals import pin_nothing


def install(count: int, *, apex: bool = False) -> None:
    """Lets this process see emulated GPUs.

    Args:
        count: Their number.
        apex: Whether an absent apex is replaced.
    """
    gpus.count = count
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        # Programs also count the GPUs here; real ones stay hidden.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
    install_devices()
    install_generator()
    install_factories()
    install_module_draws()
    install_cuda()
    install_precision()
    install_compilation()
    install_process_groups()
    install_synchronized_norm()
    pin_nothing()
    if apex:
        install_apex()
