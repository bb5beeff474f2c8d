"""The job of a run with the user's own module, and what it has computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.precision import UsedPrecision
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.terminal import display_path, print_line
from lit_mnist.experiment import RunSettings
from lit_mnist.profiling.timing import StepClock, commit, versions
from lit_mnist.run.folder import REPORT, RESULT
from lit_mnist.run.result import device_name
from lit_mnist.trainer import LitTrainer


@dataclass(frozen=True)
class OwnJob:
    """What each rank needs to know of a run of the user's module.

    Attributes:
        command: `train` (fit, then test), `fit`, `validate`, `test` or `predict`.
        make: Instantiates the module, its data (or None) and the options of the Trainer that are objects.
        config: The resolved configuration, as nested plain values.
        run: The section `run`.
        seed: The seed.
        trainer: The further arguments of the Trainer.
        strategy: `auto`, `ddp` or `ddp_find_unused_parameters_true`.
        precision: The precision to use.
        devices: Devices of this machine.
        world_size: Number of ranks over all machines.
        threads: Threads per rank.
        folder: The run folder.
        command_line: The command line of the user.
        first_process: ID of the process whose start is the start of the run.
        checkpoint: The checkpoint to resume from or to evaluate.
    """

    command: str
    make: Callable[[], tuple[LightningModule, LightningDataModule | None, dict[str, Any]]]
    config: Mapping[str, Any]
    run: RunSettings
    seed: int
    trainer: Mapping[str, Any]
    strategy: str
    precision: UsedPrecision
    devices: Devices
    world_size: int
    threads: int
    folder: Path
    command_line: str
    first_process: int
    checkpoint: Path | None = None

    @property
    def trains(self) -> bool:
        """Whether the job trains."""
        return self.command in {"train", "fit"}


@dataclass
class Outcome:
    """What a run has computed."""

    trainer: LitTrainer
    clock: StepClock
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    seconds: float | None = None
    steps: int = 0
    epochs: int = 0
    steps_now: int = 0
    stopped_early: str | None = None
    validation: dict[str, float] | None = None
    test: dict[str, float] | None = None
    # Why the metrics depend on the number of ranks, each with the fix.
    inexact: list[str] = field(default_factory=list)

    def add_inexact(self, trainer: LitTrainer) -> None:
        """Notes why the last evaluation depends on the number of ranks."""
        self.inexact += [reason for reason in trainer.inexact_evaluation if reason not in self.inexact]


def build_result(
    job: OwnJob, rank: Rank, device: torch.device, outcome: Outcome, name: str, data_name: str | None
) -> dict[str, Any]:
    """Returns the content of `result.json`, without the memory."""
    speed = outcome.clock.images_per_s()
    return {
        "engine": "lightning",
        "model": name,
        "data": {"name": data_name},
        "world_size": rank.world_size,
        "device": device_name(device),
        "precision": job.precision,
        "config": dict(job.config),
        "checkpoint": str(job.checkpoint.absolute()) if job.checkpoint and not job.trains else None,
        "steps": outcome.steps,
        "epochs": outcome.epochs,
        "stopped_early": outcome.stopped_early,
        "threads": torch.get_num_threads(),
        "train": {"seconds": outcome.seconds, "steps": outcome.steps_now, "steps_per_s": speed},
        "validation": outcome.validation,
        "test": outcome.test,
        "exact": not outcome.inexact,
        "exact_reasons": outcome.inexact,
        "weights_sha256": weights_sha256(outcome.weights),
        "seconds_to_first_step": outcome.clock.seconds_to_first_step,
        "versions": versions(),
        "commit": commit(),
        "command": job.command_line,
        "run_dir": str(job.folder),
    }


def summarize(job: OwnJob, rank: Rank, outcome: Outcome) -> None:
    """Prints the summary of a run."""
    ranks = f"{rank.world_size} rank{'s' * (rank.world_size != 1)}"
    print_line()
    if outcome.seconds is not None:
        steps = f"{outcome.steps} step{'s' * (outcome.steps != 1)}"
        print_line(f"trained   {steps} on {ranks}, {job.precision}, in {outcome.seconds:.1f} s")
        if outcome.stopped_early:
            print_line(f"stopped early: {outcome.stopped_early}")
    for title, metrics in (("validated", outcome.validation), ("tested", outcome.test)):
        if metrics:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if math.isfinite(value))
            print_line(f"{title:<9} {shown}")
    for reason in outcome.inexact:
        print_line(f"note: not exact, these metrics depend on the number of ranks: {reason}")
    print_line(f"results   {display_path(job.folder / RESULT)}, {display_path(job.folder / REPORT)}")
