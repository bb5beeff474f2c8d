"""The predicted time of a whole training on devices that this machine does not have.

The computing is that of the one measured device, per sample: a smaller batch is assumed to cost as much for each. The
communication takes the assumed bandwidth and latency of a network, and nothing else: the time to handle messages and to
wait is not modeled. So a prediction says what the network allows. It has two bounds: everything that can overlap with
the backward pass does, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.recipe import Recipe
from benchmarks.scaling import RAW_DDP, SERVER
from benchmarks.workload import (
    BACKWARD,
    BACKWARD_WITH_RECOMPUTATION,
    Collective,
    Workload,
    batch_norm,
    ddp_gradient,
    gradient_buckets,
    server_gradient,
)
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.experiment.plan import Plan
from lit_mnist.models.build import build_net

# Bytes per second in each direction, and seconds for an empty message: typical values, not measured here.
NETWORKS = {
    "1 Gb/s Ethernet": (125e6, 50e-6),
    "10 Gb/s Ethernet": (1.25e9, 20e-6),
    "100 Gb/s InfiniBand": (12.5e9, 2e-6),
}
# The same between the GPUs of one machine.
LINKS = {
    "PCIe 4.0 x16": (25e9, 10e-6),
    "NVLink 3": (250e9, 5e-6),
}


def network_of(recipe: Recipe) -> nn.Module:
    """Returns the recipe's network without values (device `meta`)."""
    return _network(recipe.experiment.model, recipe.num_classes)


@cache
def _network(settings: ModelSettings, num_classes: int) -> nn.Module:
    with torch.device("meta"):
        return build_net(settings, num_classes=num_classes, seed=0)


def forecast(
    recipe: Recipe, net: nn.Module, counts: Sequence[int], seconds_per_sample: float, *, gpu: bool
) -> list[dict[str, Any]]:
    """Returns the time of the training for each number of devices, engine and network, or why it cannot be run.

    Args:
        recipe: The experiment.
        net: Its network.
        counts: Numbers of devices.
        seconds_per_sample: Time in which one device trains on a sample.
        gpu: Whether the devices are GPUs of one machine, and not machines.

    Returns:
        Rows of plain values; times in seconds, `from` the lower bound `to` the upper one.
    """
    alone = recipe.plan(1)
    whole = alone.total_steps * alone.batch_size * alone.accumulate * seconds_per_sample
    rows: list[dict[str, Any]] = []
    for count in counts:
        for engine in (RAW_DDP, SERVER):
            try:
                plan = recipe.plan(count)
            except InputError as error:
                rows.append({"engine": engine, "devices": count, "refused": str(error)})
                continue
            load = load_of(recipe, net, engine, plan, gpu=gpu)
            for network, (bandwidth, latency) in (LINKS if gpu else NETWORKS).items():
                bounds = [
                    load.seconds(count, seconds_per_sample, bandwidth, latency, overlap=overlap)
                    for overlap in (True, False)
                ]
                seconds = [plan.total_steps * each for each in bounds]
                rows.append(
                    {
                        "engine": engine,
                        "devices": count,
                        "network": network,
                        "bandwidth_bytes_per_s": bandwidth,
                        "latency_s": latency,
                        "steps": plan.total_steps,
                        "step_seconds": _range(bounds),
                        "seconds": _range(seconds),
                        "speed_up": _range([whole / each for each in reversed(seconds)]),
                    }
                )
    return rows


def load_of(recipe: Recipe, net: nn.Module, engine: str, plan: Plan, *, gpu: bool) -> Workload:
    """Returns a step of an engine on the ranks of a plan.

    Args:
        recipe: The experiment.
        net: Its network.
        engine: `raw_ddp` or `parameter_server`.
        plan: The plan of the whole training.
        gpu: Whether batch norm is that of torch.
    """
    model, trainer = recipe.experiment.model, recipe.experiment.trainer
    element = 8 if trainer.precision == "64-true" else 4
    each_time = batch_norm(net, element, gpu=gpu) if trainer.sync_batchnorm is not False else []
    if recipe.is_segmentation:
        # The number of pixels, over which the loss is a mean.
        each_time = [*each_time, Collective("all_reduce", 8)]
    gradient = ddp_gradient if engine == RAW_DDP else server_gradient
    return Workload(
        samples=plan.batch_size * plan.accumulate // plan.world_size,
        collectives=[*each_time * plan.accumulate, *gradient(net, element)],
        micro_batches=plan.accumulate,
        backward=BACKWARD_WITH_RECOMPUTATION if model.checkpoint_activations else BACKWARD,
    )


def gradient_of(net: nn.Module) -> dict[str, Any]:
    """Returns the sizes of a network's gradients in float32, as plain values."""
    sizes = gradient_buckets(net)
    return {
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "gradient_bytes": sum(sizes),
        "buckets": sizes,
        "batch_norms": len(batch_norm(net)) // 2,
    }


def _range(bounds: Sequence[float]) -> Mapping[str, float]:
    return {"from": bounds[0], "to": bounds[-1]}
