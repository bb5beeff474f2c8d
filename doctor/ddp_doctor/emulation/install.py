"""Installs the emulation in this process."""

from __future__ import annotations

import os
from pathlib import Path

from ddp_doctor.emulation.cuda import install_cuda
from ddp_doctor.emulation.process_groups import install_process_groups
from ddp_doctor.emulation.tensors import gpus, install_tensors


def install(count: int) -> None:
    """Lets this process see emulated GPUs.

    Args:
        count: Their number.
    """
    gpus.count = count
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        # Programs also count the GPUs here; real ones stay hidden.
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(count)))
    install_tensors()
    install_cuda()
    install_process_groups()
