"""The LightningModule: the network, its loss, its optimizer and its metrics."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn

from lit_mnist.checkpoint.format import verified_checkpoint
from lit_mnist.data.batch import Batch, make_draw
from lit_mnist.experiment import ModelSettings
from lit_mnist.experiment.plan import scaled_lr
from lit_mnist.models.build import build_net
from lit_mnist.models.sync_batch_norm import broadcast_buffers
from lit_mnist.plugins.exact_metrics import ExactMetrics
from lit_mnist.training.evaluation import Evaluation, Prediction, check_count, metrics_of, predictions_of
from lit_mnist.training.examples import Examples
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss, make_optimizer, window_of
from lit_mnist.training.schedule import make_schedule, schedule_length
from lit_mnist.training.train_metrics import TrainMetrics


class LitClassifier(LightningModule):
    """A classifier of images, or of their pixels, for the batches of `MNISTDataModule` and of any other loader.

    A batch is (images, targets): float [batch, channels, height, width], and int64 [batch] or [batch, height, width].

    Args:
        num_classes: Number of classes.
        seed: Seed of the initial weights and of dropout.
        **model: The settings of `ModelSettings`.
    """

    def __init__(self, num_classes: int = 10, seed: int = 42, **model: Any) -> None:
        super().__init__()
        self.settings = ModelSettings(**model)
        self.save_hyperparameters({"num_classes": num_classes, "seed": seed, **asdict(self.settings)})
        self.net = build_net(self.settings, num_classes=num_classes, seed=seed)
        self.train_metrics, self.metrics = TrainMetrics(), ExactMetrics(num_classes)
        self.examples = Examples(num_classes)
        self.evaluation: Evaluation | None = None
        self.optimizer_steps, self.total_steps = 0, 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, classes, ...], of normalized images, [batch, channels, height, width]."""
        return self.net(images)

    def setup(self, stage: str) -> None:
        """Puts the weights into the memory format in which they compute fastest."""
        self.net.to(memory_format=torch.channels_last)

    def teardown(self, stage: str) -> None:
        """Leaves contiguous weights, which formats such as safetensors expect."""
        self.net.to(memory_format=torch.contiguous_format)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer, and its learning rate schedule over the steps of the run."""
        lr = scaled_lr(self.settings, self.trainer.world_size)
        optimizer = make_optimizer(self.net, replace(self.settings, lr=lr))
        # The GradScaler skips a step whose gradient overflowed: then the schedule does not advance either.
        optimizer.register_step_post_hook(lambda *_: setattr(self, "optimizer_steps", self.optimizer_steps + 1))
        steps = schedule_length(self.settings, self.total_steps or self.trainer.estimated_stepping_batches)
        schedule = make_schedule(optimizer, self.settings, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advances the learning rate schedule, unless the optimizer's step was skipped."""
        if scheduler.last_epoch < self.optimizer_steps:
            scheduler.step()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        """Returns the loss of a micro-batch, and its logits."""
        batch = Batch.of(batch)
        logits = self.net(batch.images, batch.draw or make_draw(self.hparams["seed"], self.trainer, batch))
        loss = mean_loss(logits, batch.targets, self.settings.label_smoothing)
        self.log_training(loss, logits, batch.targets, batch_idx)
        # The Trainer divides by the length of a full accumulation window, but the last of an epoch may be shorter.
        window, accumulate = window_of(self.trainer, batch_idx), self.trainer.accumulate_grad_batches
        return {"loss": accumulated_loss(loss, window, accumulate), "logits": logits.detach()}

    def log_training(self, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, batch_idx: int) -> None:
        """Logs the loss, the accuracy and the learning rate at some steps, exactly over all ranks."""
        self.train_metrics.update(loss)
        if self.train_metrics.is_logged(self.trainer, batch_idx):
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            self._log({**self.train_metrics.compute(logits, targets), "lr": lr})

    def on_validation_epoch_start(self) -> None:
        """Gives every rank the same buffers, so that all of them evaluate one network."""
        broadcast_buffers(self.net)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch to the sums of this rank."""
        batch = Batch.of(batch)
        self.metrics.update(self.net(batch.images), batch.targets)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch to the sums of this rank, and keeps examples of it."""
        batch = Batch.of(batch)
        logits = self.net(batch.images)
        self.metrics.update(logits, batch.targets)
        self.examples.add(logits, batch.targets, batch.indices)

    def on_validation_epoch_end(self) -> None:
        """Combines the sums of all ranks, and logs the metrics."""
        evaluation = self.metrics.evaluation()
        self.metrics.reset()
        if not self.trainer.sanity_checking:
            self.evaluation = evaluation
            check_count(self.trainer, evaluation.count)
            metrics = metrics_of(evaluation, "test" if self.trainer.testing else "val")
            # All ranks have the same values: their maximum is exact, their mean would be rounded.
            self._log(metrics, sync_dist=True, reduce_fx="max")

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> Prediction:
        """Returns the numbers of the samples, as far as they are known, their classes and their probabilities."""
        batch = Batch.of([batch, batch] if isinstance(batch, torch.Tensor) else batch)
        return batch.indices, *predictions_of(self.net(batch.images))

    def _log(self, metrics: dict[str, float], **options: Any) -> None:
        # In double precision, so that nothing is rounded.
        for name, value in metrics.items():
            self.log(name, torch.tensor(value, dtype=torch.float64, device=self.device), **options)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Returns the module of a checkpoint or run folder, verified; nothing that the file contains is executed."""
        path = verified_checkpoint(Path(checkpoint_path), rank_zero_warn)
        return super().load_from_checkpoint(path, *args, **{**kwargs, "weights_only": True})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the number of steps that the optimizer took, and makes the weights contiguous."""
        checkpoint["steps_made"] = self.optimizer_steps
        checkpoint["state_dict"] = {name: tensor.contiguous() for name, tensor in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the number of steps that the optimizer took."""
        self.optimizer_steps = checkpoint["steps_made"]
