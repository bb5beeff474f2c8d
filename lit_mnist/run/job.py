"""A job: what each rank needs to know of a run, validated once by the parent process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lit_mnist.checkpoint.saved import make_section
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.precision import UsedPrecision
from lit_mnist.distributed.rank import Rank
from lit_mnist.run.outcome import Outcome
from lit_mnist.run.settings import Command, RunSettings

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule
    from torch import nn


class Parts(NamedTuple):
    """What a Trainer trains.

    Attributes:
        module: The LightningModule.
        data: Its data; None if the module has the loaders.
        options: Arguments of the Trainer, such as callbacks.
        network: The part of the module whose weights are the result: the module itself, or the network in it.
    """

    module: LightningModule
    data: LightningDataModule | None
    options: dict[str, Any]
    network: nn.Module


@dataclass(frozen=True, kw_only=True)
class Job:
    """What each rank needs to know of a run.

    Attributes:
        command: `train` (fit, then test the best weights), `fit`, `validate`, `test` or `predict`.
        engine: Name of the engine.
        run: The section `run`.
        config: The resolved configuration as nested plain values, as `config.yaml` states it.
        seed: The seed.
        make: Instantiates the module, its data, and the options of the Trainer for a job; for the engine lightning.
        devices: Devices of this machine.
        world_size: Number of ranks over all machines.
        precision: The precision to use.
        threads: Threads per rank.
        folder: The run folder.
        command_line: The command line of the user.
        first_process: ID of the process whose start is the start of the run.
        checkpoint: The checkpoint to resume from or to evaluate.
        imports: The user's packages of `--import`, which a rank in a new process imports first.
        resumable: Whether the engine can resume its runs.
        testable: Whether the engine has the command `test`.
        columns: Names of the metrics that have a column in `metrics.csv` from the start.
        report: Writes `report.html` on rank 0.
        predictions: Writes the predictions of this rank's batches, on all ranks together. None if the outputs of a
            prediction are written as they are.
    """

    command: Command
    engine: str
    run: RunSettings
    config: Mapping[str, Any]
    seed: int
    devices: Devices
    world_size: int
    precision: UsedPrecision
    threads: int
    folder: Path
    command_line: str
    first_process: int
    make: Callable[[Any], Parts] | None = None
    checkpoint: Path | None = None
    imports: tuple[str, ...] = ()
    resumable: bool = False
    testable: bool = False
    columns: tuple[str, ...] = ()
    report: Callable[[Job, Mapping[str, Any], Outcome], None] | None = None
    predictions: Callable[[Any, Rank, Iterable[Any]], None] | None = None

    @property
    def trains(self) -> bool:
        """Whether the job trains."""
        return self.command in {"train", "fit"}

    @property
    def import_flag(self) -> str:
        """The flag `--import` with a space before it, for a command that continues this run; empty without packages."""
        return f" --import {','.join(self.imports)}" if self.imports else ""

    @property
    def samples_per_step(self) -> int | None:
        """Samples of an optimizer step over all ranks; None if the job does not know them."""
        return None

    @property
    def lr(self) -> float | None:
        """The learning rate; of a schedule, its peak. None if the job does not know it."""
        return None

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run; None if the job does not know them."""
        return None

    def describe(self) -> dict[str, Any]:
        """Returns what `result.json` says of the model and the data."""
        data = (self.config.get("data") or {}).get("class_path")
        return {
            "model": (self.config.get("model") or {}).get("class_path"),
            "data": {"name": data, "source": None, "sha256": None},
            "registered": {},
            "cuda_graph": False,
        }

    def section(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the run, as plain values."""
        return make_section(
            engine=self.engine,
            config=self.config,
            precision=self.precision,
            threads=self.threads,
            world_size=self.world_size,
            # nn.DataParallel runs one rank on several devices.
            local_world_size=min(self.devices.count, self.world_size),
        )

    def position(self, step: int) -> dict[str, Any]:
        """Returns the entries of a Lightning checkpoint that are a function of the optimizer step, if there are any."""
        return {}

    def can_continue(self, steps: int) -> bool:
        """Returns whether a training run that has ended after some optimizer steps can be resumed with more epochs."""
        return False

    def note_partial(self, metrics: Mapping[str, Any] | None, stage: str) -> Mapping[str, Any] | None:
        """Returns the metrics of a stage (`val` or `test`), which say so if a limit has excluded a part of the data."""
        return metrics

    def samples_of(self, step: int, ranks: Sequence[int]) -> list[int] | None:
        """Returns the indices of the training samples of an optimizer step on some ranks; None if they are unknown."""
        return None
