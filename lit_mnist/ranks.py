"""A rank: who it is among the others, on which device it computes, and how its process is set up."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from dataclasses import dataclass

import torch
from torch.distributed import HashStore, Store

from lit_mnist.errors import InputError
from lit_mnist.experiment import TrainerSettings

_LOOPBACK = "lo" if platform.system() == "Linux" else "lo0"
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Rank:
    """One process of a run.

    Attributes:
        rank: Number among all ranks, from 0.
        world_size: Number of all ranks.
        local_rank: Number among the ranks of this machine, from 0.
        local_world_size: Number of ranks of this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone prints, logs and writes."""
        return self.rank == 0

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self.world_size // self.local_world_size

    @classmethod
    def from_environment(cls) -> Rank:
        """Returns what the launcher has written into the environment."""
        values = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
        return cls(*values)


def launched_from_outside() -> bool:
    """Returns whether a launcher such as torchrun has started this process as one rank of several."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"))


@dataclass(frozen=True)
class Devices:
    """The devices of this machine that a run uses.

    Attributes:
        kind: `cpu` or `cuda`.
        numbers: The GPU of each local rank, or 0 to n - 1 for n ranks on a CPU.
    """

    kind: str
    numbers: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of ranks on this machine."""
        return len(self.numbers)

    def of(self, rank: Rank) -> torch.device:
        """Returns the device of a rank."""
        return torch.device("cuda", self.numbers[rank.local_rank]) if self.kind == "cuda" else torch.device("cpu")


def choose_devices(trainer: TrainerSettings) -> Devices:
    """Returns the devices that the settings mean on this machine, without initialising a GPU.

    Raises:
        InputError: More GPUs, or others, are asked for than there are.
    """
    gpus = torch.cuda.device_count() if trainer.accelerator != "cpu" else 0
    if trainer.accelerator == "gpu" and gpus == 0:
        raise InputError("trainer.accelerator is gpu, but this machine has no GPU: use cpu or auto.")
    wanted = trainer.devices
    if gpus == 0:
        count = 1 if wanted == "auto" else len(wanted) if isinstance(wanted, list) else int(wanted)
        return Devices("cpu", tuple(range(count)))
    if wanted == "auto":
        return Devices("cuda", tuple(range(gpus)))
    numbers = tuple(wanted) if isinstance(wanted, list) else tuple(range(int(wanted)))
    missing = [number for number in numbers if number >= gpus]
    if missing:
        raise InputError(
            f"trainer.devices asks for {'GPU ' + str(missing[0]) if isinstance(wanted, list) else f'{wanted} GPUs'}, "
            f"but this machine has {gpus}: ask for fewer, or for --trainer.accelerator cpu."
        )
    return Devices("cuda", numbers)


def threads_per_rank(threads: int | None, local_world_size: int) -> int:
    """Returns `run.threads`, or by default the cores that this process may use divided by the ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return threads or max(1, cores // local_world_size)


def die_with_parent() -> None:
    """Lets the kernel kill this process when its parent ends, however that ends (Linux; elsewhere nothing)."""
    if platform.system() == "Linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def stay_on_loopback() -> None:
    """Keeps the ranks' connections within this machine, unless the user has named an interface.

    Without a name gloo listens on the address that the host's name resolves to, which may be reached from outside.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(variable, _LOOPBACK)


def meeting_point() -> Store | None:
    """Returns None where a launcher has written into the environment where the ranks meet, else a lone rank's store."""
    return None if "MASTER_ADDR" in os.environ else HashStore()
