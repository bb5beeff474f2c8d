"""Installs the emulation in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ddp_doctor.emulation.cuda_module import install_cuda
from ddp_doctor.emulation.devices import gpus, install_devices
from ddp_doctor.emulation.factories import install_factories, install_generator
from ddp_doctor.emulation.generators import install_module_draws
from ddp_doctor.emulation.precision import install_precision
from ddp_doctor.emulation.process_groups import install_process_groups
from ddp_doctor.emulation.torch_internals import optimized_module, pin_nothing


def install(count: int) -> None:
    """Lets this process see emulated GPUs.

    Args:
        count: Their number.
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
    install_process_groups()
    pin_nothing()
    torch.compile = _compile
    # It compiles the source of the functions that are called, and the emulated ones have another.
    torch.jit.script = lambda obj=None, *_, **__: obj


def _compile(model: Any = None, **kwargs: Any) -> Any:
    """Returns a module or a function that is called as it is."""
    if model is None:
        return lambda function: _compile(function, **kwargs)
    # The weights of a module have the prefix `_orig_mod.`, as after a compilation.
    return optimized_module(model) if isinstance(model, nn.Module) else model
