"""Validates a request: its settings, the checkpoint that it names, the engine, and the devices of this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lit_mnist.checkpoint.format import LAST, find_checkpoint, find_weights
from lit_mnist.checkpoint.resume import Saved
from lit_mnist.checkpoint.store import find_newest_valid
from lit_mnist.cli.parser import Request
from lit_mnist.distributed.devices import Devices, choose_devices
from lit_mnist.distributed.rank import Rank, launched_from_outside, print_once, warn_once
from lit_mnist.engines.capabilities import CAPABILITIES
from lit_mnist.engines.device_checks import check_devices, uses_cuda_graph
from lit_mnist.errors import InputError
from lit_mnist.experiment import Experiment, RunSettings, TrainerSettings
from lit_mnist.run.folder import was_restarted


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
    """

    request: Request
    engine: str
    experiment: Experiment
    saved: Saved | None
    devices: Devices
    world_size: int
    cuda_graph: bool
    stated: Mapping[str, Any]


def validate(request: Request, engine: str) -> Validated:
    """Checks everything that requires neither data nor a run folder.

    Raises:
        InputError: The request is rejected; nothing was written.
    """
    check_accelerate()
    saved = _find_saved(request)
    experiment = _make_experiment(request, saved)
    stated: dict[str, Any] = {}
    if request.extras.names:
        from lit_mnist.cli.lightning_cli import check_trainer_options

        stated = check_trainer_options(request.extras, experiment)
    if saved and request.trains:
        if not CAPABILITIES[engine].resume:
            raise InputError(f"The engine {engine} cannot resume from {saved.path}: choose another --run-dir.")
        saved.check_same(experiment)
    devices, world_size = choose_ranks(experiment.trainer)
    check_devices(engine, experiment, devices, world_size)
    cuda_graph = request.trains and uses_cuda_graph(engine, experiment, devices, world_size, request.extras.names)
    check_launch(experiment.run, world_size)
    return Validated(request, engine, experiment, saved, devices, world_size, cuda_graph, stated)


def resumes_in_place(request: Request) -> bool:
    """Returns whether a training resumes from what it finds in `run.dir`: `--resume auto`, or after a restart."""
    return request.run_dir is not None and (request.resume == "auto" or was_restarted(Path(request.run_dir)))


def _make_experiment(request: Request, saved: Saved | None) -> Experiment:
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


def _find_saved(request: Request) -> Saved | None:
    """Reads the checkpoint that the request names or its run folder contains."""
    if not request.trains:
        if not request.checkpoint:
            raise InputError(f"{request.command} needs --ckpt RUN_DIR_OR_CKPT: the trained weights.")
        return Saved.read(find_weights(Path(request.checkpoint), print_once), hashed=False)
    if request.resume == "auto" and not request.run_dir:
        raise InputError("--resume auto resumes in the folder of --run-dir: give --run-dir, too.")
    if resumes_in_place(request):
        folder = Path(str(request.run_dir))
        if found := find_newest_valid(folder, warn_once):
            return Saved.read(found.path)
        if list(folder.glob("checkpoints/*.ckpt")):
            raise InputError(f"The folder {folder} contains no valid checkpoint: move the others away to start again.")
    if request.resume in {None, "auto"}:
        return None
    source = Path(str(request.resume))
    if not source.is_dir():
        return Saved.read(find_checkpoint(source, (LAST,)))
    if found := find_newest_valid(source, warn_once):
        return Saved.read(found.path)
    raise InputError(f"The folder {source} contains no valid checkpoint to resume from.")


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
            "machine: leave --devices out."
        )
    if trainer.num_nodes not in {1, rank.num_nodes}:
        raise InputError(
            f"trainer.num_nodes is {trainer.num_nodes}, but the launcher has started ranks on {rank.num_nodes} "
            "machine(s): leave it out."
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


def check_accelerate() -> None:
    """Rejects a start by `accelerate launch` that made one process on CPUs where several were requested."""
    several = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if several and "RANK" not in os.environ:
        raise InputError(
            "accelerate launch was asked for several processes and has started one, as it does on CPUs: use torchrun, "
            "or --devices without a launcher."
        )
