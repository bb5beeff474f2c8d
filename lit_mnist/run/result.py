"""The content of `result.json`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from lit_mnist.checkpoint.digest import weights_sha256
from lit_mnist.distributed.rank import Rank
from lit_mnist.experiment import flatten
from lit_mnist.experiment.registry import registered_by
from lit_mnist.run.timing import StepClock, commit, unshared_memory, versions
from lit_mnist.training.evaluation import Evaluation
from lit_mnist.training.job import Job


@dataclass(frozen=True)
class Trained:
    """The metrics of a training.

    Attributes:
        steps: Optimizer steps since the start of the run.
        steps_now: Optimizer steps since the run was last resumed.
        skipped_steps: Steps that the GradScaler skipped because the gradient overflowed.
        epochs: Epochs; the last may be incomplete.
        loss: Last logged training loss.
        seconds: Duration of the training, including validation.
        stopped_early: Why a callback stopped the training before its last step, or None.
    """

    steps: int
    steps_now: int
    skipped_steps: int
    epochs: int
    loss: float | None
    seconds: float
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


def build_result(
    job: Job,
    *,
    world_size: int,
    device: torch.device,
    weights: Mapping[str, torch.Tensor],
    clock: StepClock,
    memory: int,
    gpu_memory: int | None,
    trained: Trained | None,
    validation: Evaluation | None,
    test: Evaluation | None,
) -> dict[str, Any]:
    """Returns the content of `result.json`."""
    config = job.experiment.to_dict()
    config["trainer"].update(job.stated)
    return {
        "engine": job.engine,
        "world_size": world_size,
        "device": device_name(device),
        "precision": job.precision,
        "config": config,
        "checkpoint": str(job.checkpoint.absolute()) if job.checkpoint and not job.trains else None,
        "data": {"name": job.dataset.name, "source": job.dataset.source, "sha256": job.dataset.sha256},
        "imports": list(job.imports),
        "registered": {own.key: own.to_dict() for own in registered_by(dict(flatten(config)))},
        "steps": trained.steps if trained else 0,
        "skipped_steps": trained.skipped_steps if trained else 0,
        "epochs": trained.epochs if trained else 0,
        "stopped_early": trained.stopped_early if trained else None,
        "threads": torch.get_num_threads(),
        "cuda_graph": job.cuda_graph,
        "train": {
            "images_per_s": clock.images_per_s(),
            "seconds": trained.seconds if trained else None,
            "loss": trained.loss if trained else None,
            "lr": job.plan.lr if trained else None,
            "steps": trained.steps_now if trained else 0,
            "scheduled_steps": job.plan.total_steps if trained else 0,
        },
        "validation": _metrics(validation, job.experiment.data.val_size),
        "test": _metrics(test, min(job.experiment.data.test_size or len(job.dataset.test), len(job.dataset.test))),
        "weights_sha256": weights_sha256(weights),
        "seconds_to_first_step": clock.seconds_to_first_step,
        "peak_memory_bytes": memory,
        "peak_gpu_memory_bytes": gpu_memory,
        "versions": versions(),
        "commit": commit(),
        "command": job.command_line,
        "run_dir": str(job.folder),
    }


def _metrics(evaluation: Evaluation | None, samples: int) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {**evaluation.to_dict(), **({"partial": True} if evaluation.count < samples else {})}
