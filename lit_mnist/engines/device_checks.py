"""Checks whether an engine supports the devices of this machine, their precision, and CUDA graphs."""

from __future__ import annotations

import torch

from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.precision import resolve_precision
from lit_mnist.engines.capabilities import CAPABILITIES, reject_half
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment


def check_devices(engine: str, experiment: Experiment, devices: Devices, world_size: int) -> None:
    """Rejects devices, and precisions on these devices, that the engine does not support.

    Raises:
        InputError: The engine does not support the devices or the precision.
    """
    own = CAPABILITIES[engine]
    if own.processes == "one" and world_size > 1:
        raise InputError(f"The engine {engine} computes on one device, not on {world_size}: use --devices 1.")
    if own.processes == "devices" and (devices.kind != "cuda" or devices.count < 2):
        found = f"{devices.count} GPU is" if devices.kind == "cuda" else "no GPU is"
        raise InputError(f"The engine {engine} splits a batch over at least two GPUs, but {found} used here.")
    # Several ranks use the first GPUs; a single process uses all visible GPUs.
    used = torch.cuda.device_count() if world_size == 1 else devices.count
    if not own.any_gpus and devices.kind == "cuda" and devices.numbers != tuple(range(used)):
        raise InputError(
            f"The engine {engine} uses the first GPUs, or with one rank all: choose by CUDA_VISIBLE_DEVICES instead."
        )
    if experiment.model.compile and (world_size > 1 or not own.compile):
        raise InputError(
            "model.compile is supported on one device, by the engines lightning and single: torch.compile fails "
            "where DistributedDataParallel splits its graph. Remove it, or use --devices 1."
        )
    precision = resolve_precision(experiment.trainer.precision, devices.kind)
    if precision == "16-mixed" and (own.half == "nowhere" or (own.half == "cuda" and devices.kind == "cpu")):
        reject_half(engine, " on a CPU" if own.half == "cuda" else "")


def uses_cuda_graph(
    engine: str, experiment: Experiment, devices: Devices, world_size: int, extras: tuple[str, ...]
) -> bool:
    """Returns whether the steps run as CUDA graphs.

    Raises:
        InputError: A CUDA graph was requested but is not supported here.
    """
    run = experiment.run
    # Hooks and callbacks that observe the network would not see the steps of a graph.
    reasons = {
        f"the engine {engine} records none": not CAPABILITIES[engine].graph,
        f"this trains on {devices.kind}": devices.kind != "cuda",
        f"there are {world_size} ranks": world_size > 1,
        f"{experiment.model.net} is not the convnet": experiment.model.net != "convnet",
        "trainer.accumulate_grad_batches is above 1": experiment.trainer.accumulate_grad_batches > 1,
        f"run.trace is {run.trace}": run.trace != "none",
        "run.inject is given": run.inject is not None,
        f"trainer.{(*extras, '')[0]} is given": bool(extras),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if run.cuda_graph and found:
        raise InputError(
            f"run.cuda_graph is for the convnet on one GPU, by the engines lightning and single, but {found[0]}: "
            "remove it."
        )
    return not found and run.cuda_graph is not False
