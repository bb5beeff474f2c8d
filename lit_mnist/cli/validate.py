"""Checks how the ranks are launched: by which launcher, how many, and on which devices of this machine."""

from __future__ import annotations

import os
from dataclasses import replace

from lit_mnist.distributed.devices import Devices, choose_devices
from lit_mnist.distributed.rank import Rank, launched_from_outside
from lit_mnist.errors import InputError
from lit_mnist.run.settings import RunSettings
from lit_mnist.run.trainer_settings import TrainerSettings


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
