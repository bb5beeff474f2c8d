"""What each engine does for its user, found by watching who makes each decisive call during a short training."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from lit_mnist.checkpoint.manager import Keeper
from lit_mnist.data.loader import TrainBatches
from lit_mnist.models import sync_batch_norm

PACKAGE = Path(__file__).parents[1]
# The parts that Lightning calls; the project's other files are what every engine uses, and decide nothing themselves.
_LIGHTNING_SIDE = ("module.py", "datamodule.py", "trainer.py", "callbacks.py")
_LIBRARIES = ("/lightning/", "/accelerate/", "/transformers/", "/torchmetrics/")

RESTORES = "restores optimizer and schedule"
# Feature, where the call is, and its name.
PROBES: tuple[tuple[str, Any, str], ...] = (
    ("joins the process group", dist, "init_process_group"),
    ("leaves it at the end", dist, "destroy_process_group"),
    ("synchronises batch norm", sync_batch_norm, "_replace"),
    ("synchronises batch norm", torch.nn.SyncBatchNorm, "convert_sync_batchnorm"),
    ("wraps the network in DDP", DistributedDataParallel, "__init__"),
    ("gives each rank its samples", TrainBatches, "__init__"),
    ("enters autocast", torch.autocast, "__enter__"),
    ("scales the loss", torch.amp.GradScaler, "scale"),
    ("updates the scaler", torch.amp.GradScaler, "update"),
    ("runs the backward pass", torch.Tensor, "backward"),
    ("holds gradients back in accumulation", DistributedDataParallel, "no_sync"),
    ("clips the gradient", torch.nn.utils, "clip_grad_norm_"),
    ("steps the optimizer", torch.optim.SGD, "step"),
    ("clears the gradient", torch.optim.Optimizer, "zero_grad"),
    ("clears the gradient", torch.nn.Module, "zero_grad"),
    ("moves the learning rate on", LRScheduler, "step"),
    ("switches to evaluation", torch.nn.Module, "eval"),
    ("adds the evaluation up over the ranks", torchmetrics.Metric, "sync"),
    ("adds the evaluation up over the ranks", dist, "all_reduce"),
    ("lets rank 0 alone write", Keeper, "write"),
    (RESTORES, torch.optim.Optimizer, "load_state_dict"),
)
FEATURES = tuple(dict.fromkeys(feature for feature, _, _ in PROBES))


def install(engine: str, notes: Path) -> None:
    """Lets this process and its children note, in a file, who makes each call first.

    Args:
        engine: Name of the engine.
        notes: The file; each line is a feature and who does it.
    """
    noted: set[tuple[int, str, str]] = set()

    def watch(feature: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*arguments: Any, **options: Any) -> Any:
            who = _who(engine)
            key = (os.getpid(), feature, who or "")
            # The portable batch norm and the figures on the screen add up over the ranks, too: they are not asked for.
            counts = who is not None and (call is not all_reduce or sys._getframe(1).f_code.co_name == "_evaluate")
            if counts and key not in noted:
                noted.add(key)
                with notes.open("a") as file:
                    file.write(json.dumps([feature, who]) + "\n")
            return call(*arguments, **options)

        return watched

    all_reduce = dist.all_reduce
    for feature, place, name in PROBES:
        original = getattr(place, name)
        setattr(place, name, watch(feature, original))


def files_of(engine: str) -> list[Path]:
    """Returns an engine's own sources: its loop, and for Lightning the parts that its Trainer calls."""
    called = _LIGHTNING_SIDE if engine == "lightning" else ()
    return [PACKAGE / "engines" / f"{engine}.py", *(PACKAGE / name for name in called)]


def _who(engine: str) -> str | None:
    """Returns who makes the call that is being watched: the first in the stack that is not torch or a shared part."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if frame.f_code.co_name == "_initial_step":
            return None
        if path == str(PACKAGE / "engines" / f"{engine}.py"):
            return "engine"
        if path in {str(PACKAGE / name) for name in _LIGHTNING_SIDE}:
            return "project"
        if any(library in path for library in _LIBRARIES):
            return "library"
        frame = frame.f_back
    return None


def read_notes(training: Path, going_on: Path) -> dict[str, str]:
    """Returns who does each feature; where several do, the one that is the first to.

    Args:
        training: What was noted while an engine trained from the beginning.
        going_on: What was noted while it went on with a run; no file where it does not offer that.
    """
    found: dict[str, str] = {}
    for path, is_resumed in ((training, False), (going_on, True)):
        for line in path.read_text().splitlines() if path.exists() else []:
            feature, who = json.loads(line)
            # Libraries also load a state into itself, to move it to a device.
            if (feature == RESTORES) == is_resumed:
                found.setdefault(feature, who)
    return {feature: found.get(feature, "nobody") for feature in FEATURES}
