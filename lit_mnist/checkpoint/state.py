"""What a training carries from step to step, and its checkpoint: what Lightning writes, written without Lightning.

A checkpoint is one format for the engines that can go on with each other's runs. What Lightning keeps of its loops is
a function of the step, and is written as such: so it does not matter who wrote it, or at which of its hooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_mnist.checkpoint._private import lightning_loops
from lit_mnist.checkpoint.format import FORMAT, SECTION
from lit_mnist.errors import InputError
from lit_mnist.training.job import Job

# The names under which Lightning keeps the scaler and the best score: those of its plugin and of our callback.
_SCALER, MANAGER_STATE = "MixedPrecision", "KeepCheckpoints"
_PREFIX = "net."


@dataclass
class TrainingState:
    """Everything that a training carries from step to step.

    Attributes:
        net: The bare network.
        optimizer: Its optimizer.
        schedule: The learning rate's schedule.
        scaler: The loss's scaler, enabled for float16 only.
        step: Optimizer steps so far, those that the scaler left out included.
        optimizer_steps: Steps that the optimizer really made.
    """

    net: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler
    scaler: GradScaler
    step: int = 0
    optimizer_steps: int = 0

    def __post_init__(self) -> None:
        # The optimizer does not run in a step that the scaler skips, and the schedule must not advance either.
        self.optimizer.register_step_post_hook(self._count_step)

    def _count_step(self, *_: object) -> None:
        self.optimizer_steps += 1

    def checkpoint(self, job: Job, best: float) -> dict[str, Any]:
        """Returns the state as a checkpoint of plain values and tensors.

        Args:
            job: The job.
            best: The best score on the validation split so far; below 0 for none.
        """
        scaler = self.scaler.state_dict()
        return {
            "epoch": job.plan.position(self.step)[0],
            "global_step": self.step,
            "pytorch-lightning_version": version("lightning"),
            "state_dict": {_PREFIX + name: tensor.contiguous() for name, tensor in self.net.state_dict().items()},
            "loops": lightning_loops(self.step, job.plan),
            "callbacks": {MANAGER_STATE: {"best": best}},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.schedule.state_dict()],
            **({_SCALER: scaler} if scaler else {}),
            "hparams_name": None,
            "hyper_parameters": {
                "num_classes": job.dataset.num_classes,
                "seed": job.experiment.seed_everything,
                **asdict(job.experiment.model),
            },
            SECTION: make_section(job),
            "steps_made": self.optimizer_steps,
        }

    def restore(self, checkpoint: Mapping[str, Any]) -> float:
        """Takes the state of a checkpoint, and returns the best score until then.

        Raises:
            InputError: It is not the state of such a training.
        """
        try:
            self.net.load_state_dict(net_weights(checkpoint))
            self.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
            self.schedule.load_state_dict(checkpoint["lr_schedulers"][0])
            if self.scaler.is_enabled():
                self.scaler.load_state_dict(checkpoint[_SCALER])
            self.step = int(checkpoint["global_step"])
            self.optimizer_steps = int(checkpoint["steps_made"])
            return float(checkpoint["callbacks"][MANAGER_STATE]["best"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InputError(f"The checkpoint's training state does not fit ({reason}): use another one.") from error


def make_section(job: Job) -> dict[str, Any]:
    """Returns the project's own section of a job's checkpoints: format, experiment and data as plain values."""
    return {
        "format": FORMAT,
        "engine": job.engine,
        "experiment": job.experiment.to_dict(),
        "precision": job.precision,
        "threads": job.threads,
        # nn.DataParallel is one rank on several devices.
        "local_world_size": min(job.devices.count, job.plan.world_size),
        "data_sha256": job.dataset.sha256,
        "num_classes": job.dataset.num_classes,
        "batch_size": job.plan.batch_size,
        "total_steps": job.plan.total_steps,
    }


def net_weights(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the bare network's weights of a checkpoint."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint["state_dict"].items()}
