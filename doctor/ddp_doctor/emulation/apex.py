"""The parts of apex that torch has, for old programs on a machine without apex.

`apex.amp` becomes autocast without a scale, `apex.parallel` becomes torch's own classes, and the fused optimizers and
normalizations become the ordinary ones.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ddp_doctor.emulation.larc import LARC

# The types in which `amp.initialize` computes.
_LEVELS = {"O0": None, "O1": torch.float16, "O2": torch.float16, "O3": torch.float16}


def install_apex() -> None:
    """Makes the modules, unless apex is installed."""
    if importlib.util.find_spec("apex") is not None:
        return
    optimizers = {
        "FusedAdam": _Adam,
        "FusedSGD": torch.optim.SGD,
        "FusedAdagrad": torch.optim.Adagrad,
    }
    norms = {"FusedLayerNorm": nn.LayerNorm, "MixedFusedLayerNorm": nn.LayerNorm, "FusedRMSNorm": nn.RMSNorm}
    amp = {
        name: globals()[f"_{name}"]
        for name in ("initialize", "scale_loss", "master_params", "state_dict", "load_state_dict")
    }
    parallel = {
        "DistributedDataParallel": _Parallel,
        "SyncBatchNorm": nn.SyncBatchNorm,
        "convert_syncbn_model": nn.SyncBatchNorm.convert_sync_batchnorm,
        "create_syncbn_process_group": _group_of,
    }
    parts = {"amp": amp, "parallel": parallel, "optimizers": optimizers, "normalization": norms}
    parent = _module("apex", {})
    for name, content in parts.items():
        setattr(parent, name, _module(f"apex.{name}", content))
    _module("apex.parallel.LARC", {"LARC": LARC})


def _module(name: str, content: dict[str, Any]) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    made.__path__ = []
    vars(made).update(content)
    sys.modules[name] = made
    return made


def _group_of(size: int) -> Any:
    """Returns the group of this rank among groups of so many ranks; None, which is all ranks, for 0."""
    if not size:
        return None
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if world % size:
        raise ValueError(f"Groups of {size} ranks do not divide {world} ranks.")
    groups = [torch.distributed.new_group(list(range(begin, begin + size))) for begin in range(0, world, size)]
    return groups[rank // size]


class _Parallel(nn.parallel.DistributedDataParallel):
    """apex.parallel.DistributedDataParallel, whose options set when gradients are reduced."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super().__init__(module)


class _Adam(torch.optim.AdamW):
    """apex.optimizers.FusedAdam, which decouples the weight decay by default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _initialize(models: Any, optimizers: Any = None, opt_level: str = "O1", **options: Any) -> Any:
    """Lets models compute in mixed precision; returns them, with the optimizers if there are some."""
    dtype = _LEVELS.get(opt_level) if options.get("enabled", True) else None
    for model in models if isinstance(models, list) else [models]:
        if dtype is not None:
            model.forward = _in_precision(model.forward, dtype)
    return models if optimizers is None else (models, optimizers)


def _in_precision(forward: Any, dtype: torch.dtype) -> Any:
    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype=dtype):
            return _wide(forward(*args, **kwargs))

    return call


def _wide(outputs: Any) -> Any:
    """Returns outputs in 32 bits, as apex does."""
    if isinstance(outputs, torch.Tensor):
        return outputs.float() if outputs.dtype in {torch.float16, torch.bfloat16} else outputs
    if isinstance(outputs, list | tuple) and type(outputs) in {list, tuple}:
        return type(outputs)(map(_wide, outputs))
    return outputs


@contextmanager
def _scale_loss(loss: torch.Tensor, optimizers: Any, *args: Any, **kwargs: Any) -> Iterator[torch.Tensor]:
    """Gives the loss as it is: no gradient is kept in 16 bits."""
    yield loss


def _master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yields the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
    """Returns an empty state: there is no scale."""
    return {}


def _load_state_dict(state: Any) -> None:
    """Does nothing: there is no scale."""
