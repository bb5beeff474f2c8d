"""Validates a request: its settings, the checkpoint that it names, the engine, and the devices of this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lit_mnist.cli.request import Request
from lit_mnist.cli.resume import find_saved
from lit_mnist.distributed.devices import Devices, choose_devices
from lit_mnist.distributed.rank import Rank, launched_from_outside
from lit_mnist.engines.capabilities import CAPABILITIES
from lit_mnist.engines.device_checks import check_devices, uses_cuda_graph
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, RunSettings, TrainerSettings
from lit_mnist.training.resume import SavedExperiment


@dataclass(frozen=True)
class Validated:
    """A request whose settings fit each other, the engine and this machine.

    Attributes:
        request: The request.
        engine: Name of the engine.
        experiment: The experiment.
        saved: The checkpoint to start from, or None.
        devices: Devices of this machine.
        world_size: Number of ranks over all machines.
        cuda_graph: Whether the passes of a micro-batch are recorded as a CUDA graph.
        stated: The further options of Lightning's Trainer as plain values.
        make_options: Instantiates the further options; None if there are none.
    """

    request: Request
    engine: str
    experiment: Experiment
    saved: SavedExperiment | None
    devices: Devices
    world_size: int
    cuda_graph: bool
    stated: Mapping[str, Any]
    make_options: Callable[[], dict[str, Any]] | None = None


def validate(request: Request, engine: str) -> Validated:
    """Checks everything that requires neither data nor a run folder.

    Raises:
        InputError: The request is rejected; nothing was written.
    """
    saved = find_saved(request, partial(SavedExperiment.read, hashed=request.trains))
    experiment = _make_experiment(request, saved)
    stated: dict[str, Any] = {}
    make_options = None
    if request.options:
        from lit_mnist.cli.lightning_cli import ClassParser
        from lit_mnist.cli.option_checks import check_objects

        parser = ClassParser(request)
        stated, make_options = parser.plain_options(), parser.make_options
        check_objects(make_options, request.options, experiment.data)
    if saved and request.trains:
        if not CAPABILITIES[engine].resume:
            raise InputError(f"The engine {engine} cannot resume from {saved.path}: choose another --run-dir.")
        saved.check_same(experiment.to_dict())
    devices, world_size = choose_ranks(experiment.trainer)
    check_devices(engine, experiment, devices, world_size)
    cuda_graph = request.trains and uses_cuda_graph(engine, experiment, devices, world_size, request.options)
    check_launch(experiment.run, world_size)
    if request.trains:
        check_deterministic(experiment, devices.kind)
    return Validated(request, engine, experiment, saved, devices, world_size, cuda_graph, stated, make_options)


def check_deterministic(experiment: Experiment, kind: str) -> None:
    """Rejects deterministic training where torch does not support it.

    Args:
        experiment: The experiment.
        kind: Kind of the devices: `cpu` or `cuda`.

    Raises:
        InputError: The experiment trains on segmentation images, on GPUs, deterministically.
    """
    if experiment.trainer.deterministic and kind == "cuda" and experiment.data.task.pixelwise:
        raise InputError("trainer.deterministic: torch has no deterministic per-pixel loss on GPUs: remove it.")


def _make_experiment(request: Request, saved: SavedExperiment | None) -> Experiment:
    """Returns the experiment of the request; the checkpoint provides the defaults."""
    if saved is None:
        return request.experiment()
    if not request.trains:
        return request.experiment(saved.to_evaluate())
    experiment = request.experiment(saved.to_resume())
    if experiment.trainer.precision == "auto":
        # The file may say `auto`: a resumed training keeps the precision that it started with, on any machine.
        experiment = experiment.replace("trainer", precision=saved.section["precision"])
    return experiment


def choose_ranks(trainer: TrainerSettings) -> tuple[Devices, int]:
    """Returns this machine's devices and the number of ranks over all machines."""
    if not launched_from_outside():
        if trainer.num_nodes > 1:
            raise InputError(
                f"trainer.num_nodes is {trainer.num_nodes}: start the ranks of several machines with torchrun."
            )
        devices = choose_devices(trainer)
        return devices, devices.count
    rank = Rank.from_environment()
    listed = isinstance(trainer.devices, list)
    wanted = len(trainer.devices) if isinstance(trainer.devices, list) else trainer.devices
    if wanted not in {"auto", rank.local_world_size}:
        raise InputError(
            f"trainer.devices is {trainer.devices}, but the launcher has started {rank.local_world_size} ranks on this "
            "machine: remove --devices."
        )
    if trainer.num_nodes not in {1, rank.num_nodes}:
        raise InputError(
            f"trainer.num_nodes is {trainer.num_nodes}, but the launcher has started ranks on {rank.num_nodes} "
            "machine(s): remove it."
        )
    return choose_devices(trainer if listed else replace(trainer, devices=rank.local_world_size)), rank.world_size


def check_launch(run: RunSettings, world_size: int) -> None:
    """Rejects launch options that do not fit how the ranks are started, or how many there are."""
    outside = launched_from_outside()
    if outside and run.launcher != "agent":
        raise InputError("run.launcher has no effect: an outside launcher has started the ranks.")
    if run.launcher != "agent" and world_size == 1:
        raise InputError("run.launcher has no effect on one rank, which runs in this process.")
    if run.servers > world_size:
        raise InputError(f"run.servers is {run.servers}, but each needs a rank, and there are {world_size}.")
    if outside and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not run.dir:
        raise InputError("After a restart by torchrun, a run resumes in the folder of --run-dir: give --run-dir.")
    if run.max_restarts and (outside or run.launcher != "agent"):
        raise InputError("run.max_restarts has no effect: torch's elastic agent does not start the ranks here.")


def check_fault(run: RunSettings, world_size: int, total_steps: int | None = None) -> None:
    """Rejects a fault to inject that no rank or, if the number of steps is known, no step would have."""
    if run.fault is None:
        return
    _, rank, step = run.fault
    if rank >= world_size or (total_steps is not None and step > total_steps):
        steps = "" if total_steps is None else f", and the steps 1 to {total_steps}"
        raise InputError(f"run.inject is {run.inject}, but the ranks are 0 to {world_size - 1}{steps}.")


def check_accelerate() -> None:
    """Rejects a start by `accelerate launch` that made one process on CPUs where several were requested."""
    several = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if several and "RANK" not in os.environ:
        raise InputError(
            "accelerate launch was asked for several processes and has started one, as it does on CPUs: use torchrun, "
            "or --devices without a launcher."
        )
