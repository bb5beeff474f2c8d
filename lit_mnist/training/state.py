"""The state of a training, and its conversion to and from a Lightning checkpoint without Lightning.

All engines write the same format and can resume each other's runs. The state of Lightning's loops is computed from the
step, so that it does not depend on the engine or hook that saved it.
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

from lit_mnist.checkpoint.format import SECTION
from lit_mnist.checkpoint.lightning_internals import lightning_loops
from lit_mnist.checkpoint.saved import MANAGER_STATE
from lit_mnist.checkpoint.saved import make_section as checkpoint_section
from lit_mnist.errors import InputError
from lit_mnist.experiment.plan import Plan
from lit_mnist.training.job import Job

# The key under which Lightning saves the state of its precision plugin.
_SCALER = "MixedPrecision"
_PREFIX = "net."


@dataclass
class TrainingState:
    """The state of a training.

    Attributes:
        net: The bare network.
        optimizer: The optimizer.
        schedule: The learning-rate schedule.
        scaler: The gradient scaler, which is enabled for float16 only.
        step: Optimizer steps so far, including those that the scaler skipped.
        optimizer_steps: Optimizer steps so far without those that the scaler skipped.
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
            best: The best validation score so far; negative if there is none.
        """
        scaler = self.scaler.state_dict()
        return {
            "epoch": job.plan.position(self.step)[0],
            "global_step": self.step,
            "pytorch-lightning_version": version("lightning"),
            "state_dict": {_PREFIX + name: tensor.contiguous() for name, tensor in self.net.state_dict().items()},
            "loops": loops_after(self.step, job.plan),
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
        """Restores the state from a checkpoint, and returns the best validation score.

        Raises:
            InputError: The checkpoint does not fit this training.
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


def loops_after(step: int, plan: Plan) -> dict[str, Any]:
    """Returns the state dict of Lightning's loops after `step` optimizer steps."""
    epoch, batch = plan.position(step)
    return lightning_loops(
        step,
        epoch=epoch,
        batch=batch,
        batches_per_epoch=plan.batches_per_epoch,
        steps_per_epoch=plan.steps_per_epoch,
    )


def make_section(job: Job) -> dict[str, Any]:
    """Returns the `lit_mnist` section of a job's checkpoints as plain values."""
    return checkpoint_section(
        engine=job.engine,
        config=job.experiment.replace("run", dir=None, resume=None, inject=None).to_dict(),
        precision=job.precision,
        threads=job.threads,
        # nn.DataParallel runs one rank on several devices.
        local_world_size=min(job.devices.count, job.plan.world_size),
        world_size=job.plan.world_size,
        data_sha256=job.dataset.sha256,
        num_classes=job.dataset.num_classes,
        batch_size=job.plan.batch_size,
        total_steps=job.plan.total_steps,
    )


def net_weights(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights of the bare network from a checkpoint."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint["state_dict"].items()}
