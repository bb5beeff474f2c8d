"""What the whole training would take on devices that are not here: the model of a step, without anything fitted.

The computing is that of the one device that was measured, by the sample: a smaller batch is taken to cost as much for
each. What the devices share takes a network's bandwidth and latency, which are assumed, and nothing else: to fit what
handling and waiting take needs more measured points than a machine of few devices has. So a prediction says what the
network allows. Its bounds are those of `model.py`: all that can hide behind the backward pass does, or nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.model import StepModel
from benchmarks.recipe import Recipe
from benchmarks.scaling import NETWORKS, RAW_DDP, SERVER
from benchmarks.workload import (
    BACKWARD,
    BACKWARD_AGAIN,
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

# Between the GPUs of one machine, as `NETWORKS`: the usual figures of these generations, not measured here.
LINKS = {
    "PCIe 4.0 x16": (25e9, 10e-6),
    "NVLink 3": (250e9, 5e-6),
}
_LOOP = "one device"


def network_of(recipe: Recipe) -> nn.Module:
    """Returns the recipe's network without values: nothing is computed with it."""
    return _network(recipe.experiment.model, recipe.num_classes)


@cache
def _network(settings: ModelSettings, num_classes: int) -> nn.Module:
    with torch.device("meta"):
        return build_net(settings, num_classes=num_classes, seed=0)


def forecast(
    recipe: Recipe, net: nn.Module, counts: Sequence[int], seconds_per_sample: float, *, gpu: bool
) -> list[dict[str, Any]]:
    """Returns for each number of devices, engine and network what the training takes, or why it cannot be run.

    Args:
        recipe: The experiment.
        net: Its network.
        counts: Numbers of devices.
        seconds_per_sample: What one device takes for a training sample.
        gpu: Whether the devices are GPUs of one machine, and not machines.

    Returns:
        Rows of plain values; times in seconds, `from` the bound from below `to` the one from above.
    """
    model = StepModel({_LOOP: seconds_per_sample}, 0.0, 0.0, 0.0, cores=1, threads=1)
    alone = recipe.plan(1)
    whole = alone.total_steps * model.predict(load_of(recipe, net, RAW_DDP, alone, gpu=gpu), 1, 1.0, 0.0).seconds
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
                    model.predict(load, count, bandwidth, latency, hides=hides).seconds for hides in (True, False)
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
    """Returns what a step of an engine is made of, on as many ranks as a plan has.

    Args:
        recipe: The experiment.
        net: Its network.
        engine: `raw_ddp` or `parameter_server`.
        plan: The plan of the whole training.
        gpu: Whether batch norm is torch's own.
    """
    model, trainer = recipe.experiment.model, recipe.experiment.trainer
    element = 8 if trainer.precision == "64-true" else 4
    each_time = batch_norm(net, element, gpu=gpu) if trainer.sync_batchnorm is not False else []
    if recipe.is_segmentation:
        # The count of pixels, over which the loss is a mean.
        each_time = [*each_time, Collective("all_reduce", 8)]
    gradient = ddp_gradient if engine == RAW_DDP else server_gradient
    return Workload(
        engine,
        _LOOP,
        samples=plan.batch_size * plan.accumulate // plan.world_size,
        collectives=[*each_time * plan.accumulate, *gradient(net, element)],
        micro_batches=plan.accumulate,
        backward=BACKWARD_AGAIN if model.checkpoint_activations else BACKWARD,
    )


def gradient_of(net: nn.Module) -> dict[str, Any]:
    """Returns what is known of a network's gradients in float32, as plain values."""
    sizes = gradient_buckets(net)
    return {
        "parameters": sum(parameter.numel() for parameter in net.parameters()),
        "gradient_bytes": sum(sizes),
        "buckets": sizes,
        "batch_norms": len(batch_norm(net)) // 2,
    }


def _range(bounds: Sequence[float]) -> Mapping[str, float]:
    return {"from": bounds[0], "to": bounds[-1]}
