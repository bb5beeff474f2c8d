"""What the Trainer trains in a job of the experiment: LitClassifier on MNISTDataModule."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from lit_mnist.data.loader import Batch
from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.distributed.accumulation import accumulated_loss
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.recording.monitor import StepMonitorCallback
from lit_mnist.run.job import Parts
from lit_mnist.training.batches import RankBatches
from lit_mnist.training.cuda_graph import GraphedPasses, GraphedUpdate
from lit_mnist.training.examples import Examples, Wrong
from lit_mnist.training.job import ExperimentJob
from lit_mnist.training.loss import mean_loss


def make_classifier(job: ExperimentJob) -> Parts:
    """Returns the module, the data and the arguments of the Trainer of a job."""
    data = MNISTDataModule.of(RankBatches(job.experiment, job.splits, job.plan))
    kind = GraphedClassifier if job.cuda_graph else LitClassifier
    module = kind(num_classes=job.dataset.num_classes, seed=job.seed, **vars(job.experiment.model))
    if job.weights:
        module.net.load_state_dict(job.weights, strict=False)
    module.total_steps = job.plan.total_steps
    settings, plan = job.experiment.trainer, job.plan
    options: dict[str, Any] = {
        # `max_steps` and the limits are part of the plan: they shorten the loader of each epoch.
        "max_epochs": plan.epochs,
        "reload_dataloaders_every_n_epochs": 1,
        "check_val_every_n_epoch": plan.validate_every or 1,
        "limit_val_batches": 1.0 if plan.validate_every or not job.trains else 0,
        "log_every_n_steps": settings.log_every_n_steps,
        "sync_batchnorm": settings.sync_batchnorm,
        "accumulate_grad_batches": settings.accumulate_grad_batches,
        "gradient_clip_val": settings.gradient_clip_val,
        "deterministic": settings.deterministic or None,
        "enable_progress_bar": settings.enable_progress_bar,
    }
    given = job.options() if job.options else {}
    callbacks = given.get("callbacks") or []
    options |= given
    options["callbacks"] = [*(callbacks if isinstance(callbacks, list) else [callbacks]), CollectMistakes()]
    return Parts(module, data, options, module.net)


class CollectMistakes(Callback):
    """Collects the misclassified samples of a test, which the report shows."""

    def __init__(self) -> None:
        self._found = Examples()

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Batch, *_: object
    ) -> None:
        """Adds a batch; `outputs` are its logits."""
        self._found.add(outputs, batch.targets, batch.indices)

    def examples(self) -> list[Wrong]:
        """Returns the examples of all ranks; every rank must call it."""
        found, self._found = self._found, Examples()
        return found.gather()


class GraphedClassifier(LitClassifier):
    """A classifier whose steps run as CUDA graphs, on one GPU without accumulation, with bit-identical weights."""

    @cached_property
    def _graphed(self) -> GraphedPasses:
        return GraphedPasses(self._passes, self.net.parameters())

    @cached_property
    def _update(self) -> GraphedUpdate | None:
        optimizer, schedule = self.trainer.optimizers[0], self.lr_schedulers()
        if not GraphedUpdate.supports(optimizer):
            return None
        assert isinstance(schedule, LambdaLR)
        return GraphedUpdate(
            self._graphed,
            optimizer,
            schedule,
            getattr(self.trainer.precision_plugin, "scaler", None) or GradScaler(enabled=False),
            total_steps=self.total_steps,
            clip=self.trainer.gradient_clip_val,
            # `SkippedStepSchedule` calls it once for each optimizer step.
            advance=lambda: self.lr_scheduler_step(schedule, None),
        )

    @cached_property
    def _monitor(self) -> StepMonitorCallback:
        callbacks: list[Callback] = self.trainer.callbacks  # type: ignore[attr-defined] # Lightning sets it elsewhere
        return next(each for each in callbacks if isinstance(each, StepMonitorCallback))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Runs the forward and backward pass of a micro-batch, and returns its loss."""
        loss, logits = self._graphed(batch)
        if self.train_metrics.is_due(self, batch_idx):
            # The learning rate depends on the steps that the scaler skipped, which are read now.
            self._monitor.monitor.check_finite()
        self.train_metrics.log(self, loss, logits, batch.targets, batch_idx)
        return loss

    def _passes(self, batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch.images, batch.rng)
        loss = mean_loss(logits, batch.targets, self.settings.label_smoothing)
        weighted = accumulated_loss(loss, window, 1)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # Lightning runs the training step under autocast; the backward pass must not be.
        with torch.autocast(loss.device.type, enabled=False):
            (scaler.scale(weighted) if scaler else weighted).backward()
        return loss.detach(), logits.detach()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Restores the gradients, which `training_step` has already computed."""
        self._graphed.restore_gradients()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Runs the closure, which computes the gradients, and the update as a CUDA graph."""
        if self._update is None or not self._update.is_ready:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            return
        assert optimizer_closure
        optimizer_closure()
        self._monitor.on_graphed_step(self._update)
