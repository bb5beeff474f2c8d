"""The passes of a micro-batch as a CUDA graph: recorded once, and then queued on the GPU by one call.

A GPU computes the passes of a small network faster than a host can queue their kernels one by one. A graph is all of
them at once: the same kernels in the same order on the same memory, and so the same bits (PyTorch's documentation, CUDA
semantics, "CUDA Graphs"). What it reads must lie where it lay when it was recorded: a batch is copied there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lit_mnist.data.batch import Batch

# The first passes choose kernels and make what lives on: the GradScaler's scale, the libraries' handles.
_WARM_UP = 3

# Of a batch and of the number of micro-batches in its step: the loss and the logits, without autograd's graph.
Passes = Callable[[Batch, int], tuple[torch.Tensor, torch.Tensor]]


class GraphedPasses:
    """The forward and backward pass of a micro-batch, which is a step's only one; all have one size.

    Args:
        passes: Leaves the gradients in the parameters, which have none before. It may read no number back, and use
            nothing of the batch but its images and targets.
        parameters: The parameters.
    """

    def __init__(self, passes: Passes, parameters: Iterable[nn.Parameter]) -> None:
        self._passes = passes
        self._parameters = list(parameters)
        self._gradients: list[torch.Tensor | None] = []
        self._warming_up = _WARM_UP
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch, window: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the loss and the logits of a batch, and leaves its gradients; the logits last until the next call."""
        if self._warming_up:
            self._warming_up -= 1
            return self._made(batch, window)
        if self._graph is None:
            self._record(batch, window)
            assert self._graph
        else:
            self._batch.images.copy_(batch.images)
            self._batch.targets.copy_(batch.targets)
        self._graph.replay()
        self.leave_gradients()
        return self._loss.clone(), self._logits

    def leave_gradients(self) -> None:
        """Leaves the gradients of the last call in the parameters, also where they were taken away since."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient

    def _record(self, batch: Batch, window: int) -> None:
        self._batch = batch._replace(images=batch.images.clone(), targets=batch.targets.clone(), draw=None)
        graph = torch.cuda.CUDAGraph()
        # Not for other threads: the one that writes a checkpoint may free memory meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._loss, self._logits = self._made(self._batch, window)
        self._graph = graph

    def _made(self, batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        for parameter in self._parameters:
            parameter.grad = None
        made = self._passes(batch, window)
        self._gradients = [parameter.grad for parameter in self._parameters]
        return made
