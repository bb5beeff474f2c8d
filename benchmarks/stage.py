"""What can be measured on this machine: the devices, the length of the runs, and why an engine cannot run."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.recipe import Recipe
from benchmarks.scaling import RAW_DDP, SERVER
from lit_mnist.checkpoint.config import flatten
from lit_mnist.distributed.devices import Devices, choose_devices
from lit_mnist.engines.capabilities import check_engine
from lit_mnist.engines.device_checks import check_devices
from lit_mnist.errors import InputError
from lit_mnist.profiling.timing import WARM_UP_STEPS

SINGLE, DATA_PARALLEL = "single", "data_parallel"
SEVERAL = (RAW_DDP, DATA_PARALLEL, SERVER)
COUNTS = (4, 8)
_FEWEST_STEPS, _STEPS = 4, 60


@dataclass(frozen=True)
class Stage:
    """An experiment and the devices to measure it on.

    Attributes:
        recipe: The experiment.
        devices: The devices of this machine; CPUs count as one device, which several ranks share.
        steps: Optimizer steps of a run.
    """

    recipe: Recipe
    devices: Devices
    steps: int

    @classmethod
    def of(cls, recipe: Recipe, steps: int | None) -> Stage:
        """Returns the stage of this machine.

        Args:
            recipe: The experiment.
            steps: Optimizer steps of a run; None for 60.

        Raises:
            InputError: The experiment asks for GPUs that are not here, or there are too few steps.
        """
        if steps is not None and steps < _FEWEST_STEPS:
            raise InputError(f"--steps must be at least {_FEWEST_STEPS}, of which half are left out, but is {steps}.")
        found = choose_devices(replace(recipe.experiment.trainer, devices="auto"))
        return cls(recipe, found, steps or _STEPS)

    @property
    def gpu(self) -> bool:
        """Whether the devices are GPUs."""
        return self.devices.kind == "cuda"

    @property
    def left_out(self) -> int:
        """Steps of a run that are left out as warm-up."""
        return min(WARM_UP_STEPS + 1, self.steps // 2)

    def counts(self) -> tuple[int, ...]:
        """Returns the numbers of devices, above one, to measure."""
        if not self.gpu:
            return (2,)
        return tuple(count for count in COUNTS if count <= self.devices.count) or (2,) * (self.devices.count > 1)

    def pairs(self) -> list[tuple[str, int]]:
        """Returns what is measured: engines on numbers of devices."""
        return [(SINGLE, 1), *((engine, count) for count in self.counts() for engine in SEVERAL)]

    def refusal(self, engine: str, count: int) -> str | None:
        """Returns why an engine cannot train the experiment on a number of devices, or None."""
        timed, kind = self.recipe.timed(self.steps, self.devices.kind), self.devices.kind
        try:
            check_engine(engine, "fit", {**dict(flatten(timed.to_dict())), "trainer.devices": 1})
            check_devices(engine, timed, Devices(kind, tuple(range(count))), count)
            plan = self.recipe.plan(count)
            if plan.batch_size > self.recipe.timed_count:
                return f"A batch of {plan.batch_size} is more than the {self.recipe.timed_count} samples at hand."
        except InputError as error:
            return str(error)
        return None


def free_memory() -> int | None:
    """Returns the bytes that new processes can have without swapping; None if the system does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), None)


class Elsewhere:
    """Measures the share of the cores' time that other programs took since it was created."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def share(self) -> dict[str, float]:
        """Returns the share, 0 to 1, as `elsewhere`; empty if the system does not report it.

        What counts as this program's own are its children that have ended, and theirs.
        """
        before, now = self._before, _cpu_times()
        if before is None or now is None or now[1] <= before[1]:
            return {}
        busy, total, own = (after - earlier for after, earlier in zip(now, before, strict=True))
        return {"elsewhere": min(1.0, max(0.0, busy - own) / total)}


def _cpu_times() -> tuple[float, float, float] | None:
    """Returns the busy seconds of all cores, their total seconds, and our own, since the machine started."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, IndexError, ValueError):
        return None
    idle, waiting = ticks[3:5]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - idle - waiting) / per_second, sum(ticks) / per_second, sum(os.times()[:4])
