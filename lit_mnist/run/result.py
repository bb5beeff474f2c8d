"""The content of `result.json`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.rank import Rank
from lit_mnist.profiling.timing import StepClock, commit, unshared_memory, versions

if TYPE_CHECKING:
    from lit_mnist.run.job import Job


@dataclass(frozen=True)
class Trained:
    """The metrics of a training.

    Attributes:
        steps: Optimizer steps since the start of the run.
        steps_now: Optimizer steps since the run was last resumed.
        skipped_steps: Steps that the GradScaler skipped because the gradient overflowed.
        epochs: Epochs; the last may be incomplete.
        loss: Last logged training loss; None if none was logged.
        seconds: Duration of the training, including validation.
        lr: The learning rate; of a schedule, its peak. None if it is not known.
        scheduled_steps: Steps of the whole run; None if they are not known.
        samples_per_step: Samples of an optimizer step over all ranks; None if they are not known.
        stopped_early: Why a callback stopped the training before its last step, or None.
    """

    steps: int
    steps_now: int
    skipped_steps: int
    epochs: int
    loss: float | None
    seconds: float
    lr: float | None = None
    scheduled_steps: int | None = None
    samples_per_step: int | None = None
    stopped_early: str | None = None


def device_name(device: torch.device) -> str:
    """Returns `cpu`, or `cuda` with the name of the GPU."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def total_memory(clock: StepClock, rank: Rank, device: torch.device, first_process: int) -> int:
    """Returns the sum of the ranks' peaks of unshared memory and the launcher's memory in bytes, without data workers.

    Every rank must call it.
    """
    clock.update_peak_memory()
    total = torch.tensor([clock.peak_memory], dtype=torch.int64, device=device)
    if rank.world_size > 1:
        dist.all_reduce(total)
    launcher = 0 if first_process == os.getpid() else unshared_memory(first_process)
    return int(total) + launcher


def total_gpu_memory(rank: Rank, device: torch.device, gpus: Iterable[int | torch.device]) -> int | None:
    """Returns the sum of the ranks' peaks of GPU memory in bytes, or None on a CPU; every rank must call it.

    Args:
        rank: This rank.
        device: Device of this rank.
        gpus: All GPUs of this process.
    """
    if device.type != "cuda":
        return None
    total = torch.tensor([sum(map(torch.cuda.max_memory_allocated, gpus))], dtype=torch.int64, device=device)
    if rank.world_size > 1:
        dist.all_reduce(total)
    return int(total)


@dataclass
class Outcome:
    """What a run has computed.

    Attributes:
        weights: Weights of the network after the last step.
        clock: Times of the steps.
        trained: Metrics of the training, if the job trains.
        validation: Metrics of the last validation.
        test: Metrics of the test.
        examples: Samples that the report shows.
        inexact: Why the metrics depend on the number of ranks, each with the fix.
    """

    weights: Mapping[str, torch.Tensor]
    clock: StepClock
    trained: Trained | None = None
    validation: Mapping[str, Any] | None = None
    test: Mapping[str, Any] | None = None
    examples: Sequence[Any] = ()
    inexact: list[str] = field(default_factory=list)

    def add_inexact(self, reasons: Iterable[str]) -> None:
        """Adds reasons why an evaluation depends on the number of ranks."""
        self.inexact += [reason for reason in reasons if reason not in self.inexact]


def build_result(
    job: Job, *, world_size: int, device: torch.device, memory: int, gpu_memory: int | None, outcome: Outcome
) -> dict[str, Any]:
    """Returns the content of `result.json`."""
    clock, trained = outcome.clock, outcome.trained
    samples = trained.samples_per_step if trained else None
    speed = clock.steps_per_s()
    return {
        "engine": job.engine,
        "world_size": world_size,
        "device": device_name(device),
        "precision": job.precision,
        "config": dict(job.config),
        "checkpoint": str(job.checkpoint.absolute()) if job.checkpoint and not job.trains else None,
        "imports": list(job.imports),
        **job.describe(),
        "steps": trained.steps if trained else 0,
        "skipped_steps": trained.skipped_steps if trained else 0,
        "epochs": trained.epochs if trained else 0,
        "stopped_early": trained.stopped_early if trained else None,
        "threads": torch.get_num_threads(),
        "train": {
            "images_per_s": speed * samples if speed and samples else None,
            "steps_per_s": speed,
            "seconds": trained.seconds if trained else None,
            "loss": trained.loss if trained else None,
            "lr": trained.lr if trained else None,
            "steps": trained.steps_now if trained else 0,
            "scheduled_steps": trained.scheduled_steps if trained else 0,
        },
        "validation": dict(outcome.validation) if outcome.validation else None,
        "test": dict(outcome.test) if outcome.test else None,
        "exact": not outcome.inexact,
        "exact_reasons": list(outcome.inexact),
        "weights_sha256": weights_sha256(outcome.weights),
        "seconds_to_first_step": clock.seconds_to_first_step,
        "peak_memory_bytes": memory,
        "peak_gpu_memory_bytes": gpu_memory,
        "versions": versions(),
        "commit": commit(),
        "command": job.command_line,
        "run_dir": str(job.folder),
    }
