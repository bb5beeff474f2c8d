"""The content of `result.json`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.rank import Rank
from lit_mnist.profiling.timing import StepClock, commit, unshared_memory, versions
from lit_mnist.run.job import Job
from lit_mnist.run.outcome import Outcome


def device_name(device: torch.device) -> str:
    """Returns `cpu`, or `cuda` with the name of the GPU."""
    return f"cuda ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else "cpu"


def total_memory(clock: StepClock, rank: Rank, device: torch.device, first_process: int) -> int:
    """Returns the sum of the ranks' peaks of unshared memory and the launcher's memory in bytes, without data workers.

    Every rank must call it.
    """
    clock.update_peak_memory()
    launcher = unshared_memory(first_process) if rank.is_first and first_process != os.getpid() else 0
    total = torch.tensor([clock.peak_memory + launcher], dtype=torch.int64, device=device)
    if rank.world_size > 1:
        dist.all_reduce(total)
    return int(total)


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


def build_result(
    job: Job, *, world_size: int, device: torch.device, memory: int, gpu_memory: int | None, outcome: Outcome
) -> dict[str, Any]:
    """Returns the content of `result.json`."""
    clock, trained = outcome.clock, outcome.trained
    samples = trained.samples_per_step if trained else None
    speed = clock.steps_per_s()
    described = job.describe()
    if outcome.data_sha256 is not None:
        described["data"] = {**described["data"], "sha256": outcome.data_sha256}
    return {
        "engine": job.engine,
        "world_size": world_size,
        "device": device_name(device),
        "precision": job.precision,
        "config": dict(job.config),
        "checkpoint": str(job.checkpoint.absolute()) if job.checkpoint and not job.trains else None,
        "imports": list(job.imports),
        **described,
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
