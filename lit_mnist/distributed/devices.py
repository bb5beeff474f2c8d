"""The choice of this machine's devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError


@dataclass(frozen=True)
class Devices:
    """The devices of a run on this machine.

    Attributes:
        kind: `cpu` or `cuda`.
        numbers: The GPU index of each local rank; 0 to n - 1 for n ranks on the CPU.
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


class DeviceChoice(Protocol):
    """The options of Lightning's Trainer that select devices."""

    @property
    def accelerator(self) -> str:
        """`cpu`, `gpu`, or `auto`: GPUs if there are any."""

    @property
    def devices(self) -> int | list[int] | Literal["auto"]:
        """Number of ranks on this machine, a list of GPU numbers, or `auto`: all GPUs, or one rank on a CPU."""


def choose_devices(trainer: DeviceChoice) -> Devices:
    """Returns the devices that the settings select, without initializing a GPU.

    Raises:
        InputError: This machine does not have these GPUs.
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
