"""A LitClassifier whose passes are recorded as one CUDA graph; see `lit_mnist/training/cuda_graph.py`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from lit_mnist.data.loader import Batch
from lit_mnist.module import LitClassifier
from lit_mnist.training.cuda_graph import GraphedPasses
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss


class GraphedClassifier(LitClassifier):
    """A classifier for one GPU, without accumulation; its weights are bit-identical to those without a graph."""

    @cached_property
    def _graphed(self) -> GraphedPasses:
        return GraphedPasses(self._passes, self.net.parameters())

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        """Runs both passes of a micro-batch, and returns its loss and its logits."""
        loss, logits = self._graphed(batch)
        self.log_training(loss, logits, batch.targets, batch_idx)
        return {"loss": loss, "logits": logits}

    def _passes(self, batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch.images, batch.draw)
        loss = mean_loss(logits, batch.targets, self.settings.label_smoothing)
        weighted = accumulated_loss(loss, window, 1)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # A training step runs under autocast, but its backward pass does not.
        with torch.autocast(loss.device.type, enabled=False):
            (scaler.scale(weighted) if scaler else weighted).backward()
        return loss.detach(), logits.detach()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Leaves the gradients of the pass that ran with the forward pass."""
        self._graphed.leave_gradients()
