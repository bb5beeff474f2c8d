"""Runs the passes of a micro-batch as a CUDA graph.

A GPU runs the kernels of a small network faster than the host can launch them. A CUDA graph launches all of them at
once, with bit-identical results (PyTorch documentation: CUDA semantics, "CUDA Graphs"). It reads fixed addresses, to
which each batch is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from lit_mnist.data.batch import Batch

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
