"""Notices a loss or a gradient that is infinite or not a number, at its step and on all ranks together."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import get_total_norm

from lit_mnist.data.order import train_indices
from lit_mnist.errors import NonFiniteError
from lit_mnist.job import Job
from lit_mnist.ranks import Rank
from lit_mnist.training.precision import needs_scaler


class FiniteCheck:
    """Looks at each step's gradient, which all ranks share: what is not finite on one is seen by all, at once.

    Only then do the ranks ask each other whose loss it was. A gradient that overflows in float16 is the GradScaler's
    affair, as long as the loss is finite.

    Args:
        job: The job.
        rank: This rank.
    """

    def __init__(self, job: Job, rank: Rank) -> None:
        self.job, self.rank = job, rank
        self.scaled = needs_scaler(job.precision)
        self._losses: list[torch.Tensor] = []

    def batch_done(self, loss: torch.Tensor) -> None:
        """Notes a micro-batch's mean loss on this rank."""
        self._losses.append(loss)

    def forget(self) -> None:
        """Drops the losses of a step whose gradient is not looked at."""
        self._losses = []

    def gradients_done(self, parameters: list[nn.Parameter], step: int) -> None:
        """Looks at the gradient of a step before the optimizer makes it; every rank must call it.

        Args:
            parameters: The network's, with the gradient of all ranks, unscaled.
            step: The step, counted from 1.

        Raises:
            NonFiniteError: It, or the loss, is infinite or not a number; all ranks raise it together.
        """
        losses, self._losses = self._losses, []
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        # The norm alone may overflow.
        if bool(torch.isfinite(get_total_norm(gradients))) or all(bool(torch.isfinite(g).all()) for g in gradients):
            return
        bad = [loss for loss in map(float, losses) if not math.isfinite(loss)]
        told: list[list[float]] = [bad]
        if self.rank.world_size > 1:
            told = [[] for _ in range(self.rank.world_size)]
            dist.all_gather_object(told, bad)
        guilty = [number for number, losses in enumerate(told) if losses]
        if guilty:
            raise NonFiniteError(self._of_losses(step, guilty, told))
        if not self.scaled:
            raise NonFiniteError(
                f"The gradient was not finite in step {step}, though every rank's loss was. Its "
                f"{self._samples(step, range(self.rank.world_size))}"
            )

    def _of_losses(self, step: int, guilty: list[int], told: list[list[float]]) -> str:
        ranks = f"rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}"
        return f"The loss was {told[guilty[0]][0]} in step {step} on {ranks}. Its {self._samples(step, guilty)}"

    def _samples(self, step: int, ranks: range | list[int]) -> str:
        """Returns the training samples of a step on some ranks, by their numbers."""
        plan = self.job.plan
        epoch, first = plan.position(step - 1)
        share = plan.batch_size // plan.world_size
        numbers: list[int] = []
        for batch in range(first, first + plan.window(first)):
            whole = train_indices(
                self.job.experiment.seed_everything,
                epoch,
                batch,
                count=len(self.job.splits.train),
                batch_size=plan.batch_size,
            )
            for rank in ranks:
                numbers += whole[rank * share : (rank + 1) * share].tolist()
        return f"samples: {', '.join(map(str, numbers))}. Nothing was saved after step {step - 1}; try a lower --lr."
