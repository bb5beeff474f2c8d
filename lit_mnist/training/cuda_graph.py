"""Runs the passes of a micro-batch, and the update of the parameters, as CUDA graphs.

A GPU runs the kernels of a small network faster than the host can launch them. A CUDA graph launches all of them at
once, with bit-identical results (PyTorch documentation: CUDA semantics, "CUDA Graphs"). It reads fixed addresses, to
which each batch is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.sgd import sgd

from lit_mnist.data.batch import Batch
from lit_mnist.run.finite import FiniteCheck, largest_value

# The first passes select kernels and create permanent state, such as the scale of the GradScaler and library handles.
_WARM_UP = 3

# Maps a batch and the number of micro-batches in its accumulation window to the detached loss and logits.
Passes = Callable[[Batch, int], tuple[torch.Tensor, torch.Tensor]]


class GraphedPasses:
    """Runs the forward and backward pass of a micro-batch as a CUDA graph, for batches of one size.

    Args:
        passes: Stores the gradients in the parameters, whose gradients are None before. It must not synchronize with
            the host, and must use only the images and targets of the batch.
        parameters: The parameters of the network.
    """

    def __init__(self, passes: Passes, parameters: Iterable[nn.Parameter]) -> None:
        self._passes = passes
        self._parameters = list(parameters)
        self._gradients: list[torch.Tensor | None] = []
        self._warming_up = _WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch, window: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes the gradients, and returns the loss and the logits, which are valid until the next call."""
        if self._warming_up:
            self._warming_up -= 1
            return self._run(batch, window)
        if self._graph is None:
            self._record(batch, window)
            assert self._graph
        else:
            self._batch.images.copy_(batch.images)
            self._batch.targets.copy_(batch.targets)
        self._graph.replay()
        self.restore_gradients()
        return self._loss.clone(), self._logits

    @property
    def is_recorded(self) -> bool:
        """Whether the gradients have fixed addresses."""
        return self._graph is not None

    def restore_gradients(self) -> None:
        """Stores the gradients of the last call in the parameters again."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _record(self, batch: Batch, window: int) -> None:
        self._batch = batch._replace(images=batch.images.clone(), targets=batch.targets.clone(), rng=None)
        graph = torch.cuda.CUDAGraph()
        # Other threads may free memory during the capture, such as the one that writes a checkpoint.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss, self._logits = self._run(self._batch, window)
        self._graph = graph

    def _run(self, batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        for parameter in self._parameters:
            parameter.grad = None
        result = self._passes(batch, window)
        self._gradients = [parameter.grad for parameter in self._parameters]
        return result


class GraphedUpdate:
    """Runs what follows the backward pass of a step as a CUDA graph: unscaling, clipping, SGD and the scaler's update.

    The learning rate is a function of the optimizer steps that the GradScaler did not skip, which are counted on the
    device. The host counts them when it checks the gradients, and then advances its schedule.

    Args:
        passes: Computes the gradients.
        optimizer: The optimizer; see `supports`.
        schedule: Its schedule.
        scaler: The scaler, which may be disabled.
        total_steps: Optimizer steps of the run.
        clip: Largest norm of the gradient, or None.
        advance: Steps the schedule once on the host.
    """

    def __init__(
        self,
        passes: GraphedPasses,
        optimizer: Optimizer,
        schedule: LambdaLR,
        scaler: GradScaler,
        *,
        total_steps: int,
        clip: float | None,
        advance: Callable[[], object],
    ) -> None:
        self._passes, self._optimizer, self._scaler, self._advance = passes, optimizer, scaler, advance
        self._schedule, self._total_steps, self._clip = schedule, total_steps, clip
        self._graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def supports(optimizer: Optimizer) -> bool:
        """Returns whether a graph updates the parameters bit-identically: SGD of float32 parameters in one group."""
        if type(optimizer) is not SGD or len(optimizer.param_groups) > 1:
            return False
        return all(parameter.dtype == torch.float32 for parameter in optimizer.param_groups[0]["params"])

    @property
    def is_ready(self) -> bool:
        """Whether the gradients have fixed addresses, and the momentum exists."""
        has_state = bool(self._optimizer.state) or self._optimizer.param_groups[0]["momentum"] == 0
        return self._passes.is_recorded and has_state

    def __call__(self, finite: FiniteCheck, step: int) -> None:
        """Updates the parameters, and records the step, counted from 1, without waiting for the device."""
        if self._graph is None:
            self._record()
            assert self._graph
        self._graph.replay()
        largest = self._largest.clone()
        if self._scaler.is_enabled():
            finite.record(largest, step, partial(self._settle, finite, step))
        else:
            finite.record(largest, step)
            self._count()

    def _settle(self, finite: FiniteCheck, step: int, is_made: bool) -> None:
        if is_made:
            self._count()
        else:
            finite.on_step_skipped(step, self._scaler)

    def _count(self) -> None:
        # Without gradients, the optimizer changes nothing and calls its hooks, which count its steps.
        self._optimizer.zero_grad()
        self._optimizer.step()
        self._advance()

    def _record(self) -> None:
        factors, base = self._schedule.lr_lambdas[0], self._schedule.base_lrs[0]
        lrs = [base * factors(step) for step in range(self._total_steps)]
        device = self._optimizer.param_groups[0]["params"][0].device
        self._lrs = torch.tensor(lrs, dtype=torch.float32, device=device)
        self._made = torch.tensor([self._schedule.last_epoch], device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._largest = self._run()
        self._graph = graph

    @torch.no_grad()
    def _run(self) -> torch.Tensor:
        group = self._optimizer.param_groups[0]
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        gradients = [parameter.grad for parameter in parameters]
        self._scaler.unscale_(self._optimizer)
        largest = largest_value(gradients)
        is_made: torch.Tensor | None = None
        if self._scaler.is_enabled():
            # Not `isfinite`, which is four kernels.
            is_made = largest <= torch.finfo(largest.dtype).max
        if self._clip is not None:
            nn.utils.clip_grad_norm_(parameters, self._clip)
        sgd(
            parameters,
            gradients,
            [self._optimizer.state[parameter].get("momentum_buffer") for parameter in parameters],
            # In this form, the kernel reads the learning rate, and whether it must skip the step, from the device.
            foreach=False,
            fused=True,
            found_inf=None if is_made is None else is_made.logical_not().float(),
            lr=self._lrs.index_select(0, self._made),
            **{name: group[name] for name in ("weight_decay", "momentum", "dampening", "nesterov", "maximize")},
        )
        self._made.add_(1 if is_made is None else is_made)
        if self._scaler.is_enabled():
            self._scaler.update()
        return largest
