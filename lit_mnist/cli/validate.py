"""Step 2, validate: the request and the checkpoint it names become an experiment on this machine's devices."""

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
        saved: The checkpoint that the job starts from, or None.
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
    """Checks everything that needs neither data nor a run folder.

    Raises:
        InputError: Something is wrong; nothing was written.
    """
    _check_accelerate()
    saved = _find_saved(request)
    experiment = _experiment(request, saved)
    stated = _check_trainer_options(request, experiment)
    if saved and request.trains:
        if not CAPABILITIES[engine].resume:
            raise InputError(f"The engine {engine} cannot resume from {saved.path}: choose another --run-dir.")
        saved.check_same(experiment)
    devices, world_size = _ranks(experiment.trainer)
    check_devices(engine, experiment, devices, world_size)
    cuda_graph = request.trains and uses_cuda_graph(engine, experiment, devices, world_size, request.extras.names)
    _check_launch(experiment.run, world_size)
    if request.trains:
        check_deterministic(experiment, devices.kind)
    return Validated(request, engine, experiment, saved, devices, world_size, cuda_graph, stated)


def continues_in_place(request: Request) -> bool:
    """Returns whether the run continues from what it finds in its folder, where it was started before."""
    return request.run_dir is not None and (request.resume == "auto" or was_restarted(Path(request.run_dir)))


def check_deterministic(experiment: Experiment, kind: str) -> None:
    """Rejects deterministic training where torch does not support it.

    Args:
        experiment: The experiment.
        kind: Kind of the devices: `cpu` or `cuda`.

    Raises:
        InputError: Segmentation images are to be trained on GPUs, deterministically.
    """
    if experiment.trainer.deterministic and kind == "cuda" and experiment.data.task.pixelwise:
        raise InputError("trainer.deterministic: torch has no deterministic loss of pixels on GPUs: leave it out.")


def _experiment(request: Request, saved: Saved | None) -> Experiment:
    """Returns the experiment of the request, over that of the checkpoint."""
    if saved is None:
        return request.experiment()
    if not request.trains:
        return request.experiment(saved.to_evaluate())
    experiment = request.experiment(saved.to_resume())
    if experiment.trainer.precision == "auto":
        # A file may state `auto` again: it stays what it was when the training started, on any machine.
        experiment = experiment.replace("trainer", precision=saved.section["precision"])
    return experiment


def _find_saved(request: Request) -> Saved | None:
    """Reads the checkpoint that the request names or its run folder holds."""
    if not request.trains:
        if not request.checkpoint:
            raise InputError(f"{request.command} needs --ckpt RUN_DIR_OR_CKPT: the trained weights.")
        return Saved.read(find_weights(Path(request.checkpoint), print_once), hashed=False)
    if request.resume == "auto" and not request.run_dir:
        raise InputError("--resume auto continues in the folder that --run-dir names: give --run-dir, too.")
    found = None
    if continues_in_place(request):
        place = Path(str(request.run_dir))
        found = find_newest_valid(place, warn_once)
        if found is None and list(place.glob("checkpoints/*.ckpt")):
            raise InputError(f"The folder {place} holds checkpoints, but no valid one: move them away to start again.")
    if found is None and request.resume and request.resume != "auto":
        place = Path(request.resume)
        if not place.is_dir():
            return Saved.read(find_checkpoint(place, (LAST,)))
        found = find_newest_valid(place, warn_once)
        if found is None:
            raise InputError(f"The folder {place} holds no valid checkpoint to resume from.")
    return Saved.read(found.path) if found else None


def _check_trainer_options(request: Request, experiment: Experiment) -> dict[str, Any]:
    """Returns the further options of Lightning's Trainer as plain values, checked."""
    if not request.extras.names:
        return {}
    from lit_mnist.cli.lightning_cli import check_trainer_options

    return check_trainer_options(request.extras, experiment)


def _ranks(trainer: TrainerSettings) -> tuple[Devices, int]:
    """Returns this machine's devices and the number of ranks over all machines."""
    if not launched_from_outside():
        if trainer.num_nodes > 1:
            raise InputError(
                f"trainer.num_nodes is {trainer.num_nodes}: start the ranks of several machines by torchrun."
            )
        devices = choose_devices(trainer)
        return devices, devices.count
    rank = Rank.from_environment()
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
    own = replace(trainer, devices=trainer.devices if isinstance(trainer.devices, list) else rank.local_world_size)
    return choose_devices(own), rank.world_size


def _check_launch(run: RunSettings, world_size: int) -> None:
    """Rejects launch options that do not fit how the ranks are started, or how many there are."""
    outside = launched_from_outside()
    if outside and run.launcher != "agent":
        raise InputError("run.launcher is for ranks that this command starts: here an outside launcher has.")
    if run.launcher != "agent" and world_size == 1:
        raise InputError("run.launcher is for several ranks: one rank runs in this process.")
    if run.servers > world_size:
        raise InputError(f"run.servers is {run.servers}, but each needs a rank, and there are {world_size}.")
    if outside and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) and not run.dir:
        raise InputError("After a restart by torchrun, a run continues in the folder of --run-dir: give --run-dir.")
    if run.max_restarts and (outside or run.launcher != "agent"):
        raise InputError("run.max_restarts is for ranks that torch's elastic agent starts here: it has no effect.")


def _check_accelerate() -> None:
    """Rejects a start by `accelerate launch` that made one process on CPUs where several were requested."""
    several = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_ADDR" in os.environ
    if several and "RANK" not in os.environ:
        raise InputError(
            "accelerate launch was asked for several processes and has started one, as it does on CPUs: start them by "
            "torchrun, or by --devices without a launcher."
        )
