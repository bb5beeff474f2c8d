"""The state of a training run, and its conversion to and from a Lightning checkpoint without Lightning.

All engines write the same format and can resume each other's runs. The state of Lightning's loops is computed from the
step, so that it does not depend on the engine or hook that saved it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_mnist.checkpoint.format import SECTION
from lit_mnist.checkpoint.saved import MANAGER_STATE
from lit_mnist.checkpoint.serialization import plain_values
from lit_mnist.errors import InputError
from lit_mnist.training.job import ExperimentJob

# The key under which Lightning saves the state of its precision plugin.
_SCALER = "MixedPrecision"
_PREFIX = "net."


@dataclass
class TrainingState:
    """The state of a training run.

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
    # What all checkpoints of a training run share.
    _shared: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        # The optimizer does not run in a step that the scaler skips, and the schedule must not advance either.
        self.optimizer.register_step_post_hook(self._count_step)

    def _count_step(self, *_: object) -> None:
        self.optimizer_steps += 1

    def checkpoint(self, job: ExperimentJob, best: float) -> dict[str, Any]:
        """Returns the state as a checkpoint of plain values and tensors.

        Args:
            job: The job.
            best: The best validation score so far; negative if there is none.
        """
        if not self._shared:
            hparams = {"num_classes": job.dataset.num_classes, "seed": job.experiment.seed_everything}
            hparams.update(asdict(job.experiment.model))
            self._shared = {"hparams_name": None, "hyper_parameters": hparams, SECTION: plain_values(job.section())}
        scaler = self.scaler.state_dict()
        return {
            **job.position(self.step),
            "global_step": self.step,
            "pytorch-lightning_version": _lightning_version(),
            "state_dict": {_PREFIX + name: tensor.contiguous() for name, tensor in self.net.state_dict().items()},
            "callbacks": {MANAGER_STATE: {"best": best}},
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.schedule.state_dict()],
            **({_SCALER: scaler} if scaler else {}),
            **self._shared,
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


@cache
def _lightning_version() -> str:
    # Reading it takes a millisecond, as much as copying the weights.
    return version("lightning")


def net_weights(checkpoint: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights of the bare network from a checkpoint."""
    return {name.removeprefix(_PREFIX): tensor for name, tensor in checkpoint["state_dict"].items()}
