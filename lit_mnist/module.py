"""The LightningModule: network, loss, optimizer and metrics."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_mnist.checkpoint.format import find_verified_checkpoint
from lit_mnist.data.batch import Batch, make_rng
from lit_mnist.errors import InputError
from lit_mnist.experiment import ModelSettings
from lit_mnist.experiment.plan import explain_peak, peak_lr
from lit_mnist.models.build import build_net
from lit_mnist.models.sync_batch_norm import sync_buffers
from lit_mnist.plugins.exact_metrics import ClassifierMetrics
from lit_mnist.training.evaluation import Evaluation, Prediction, check_count, name_metrics, predict_with_probability
from lit_mnist.training.examples import Examples
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss, accumulation_window, make_optimizer
from lit_mnist.training.schedule import make_schedule, schedule_length
from lit_mnist.training.train_metrics import TrainMetrics


class LitClassifier(LightningModule):
    """Image classifier. It trains on `MNISTDataModule` or on any loader of (images, targets).

    Images are float [batch, channels, height, width]. Targets are int64 [batch].

    Args:
        num_classes: Number of classes.
        seed: Seed of the initial weights and of dropout.
        **model: The fields of `ModelSettings`, such as `net` and `lr`.
    """

    def __init__(self, num_classes: int = 10, seed: int = 42, **model: Any) -> None:
        super().__init__()
        self.settings = ModelSettings(**model)
        self.save_hyperparameters({"num_classes": num_classes, "seed": seed, **asdict(self.settings)})
        self.net = build_net(self.settings, num_classes=num_classes, seed=seed)
        self.train_metrics = TrainMetrics()
        self.metrics = ClassifierMetrics(num_classes)
        self.examples = Examples()
        self.evaluation: Evaluation | None = None
        self.optimizer_steps = 0
        self.total_steps = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits [batch, classes, ...] of normalized images [batch, channels, height, width]."""
        return self.net(images, None)

    def setup(self, stage: str) -> None:
        """Converts the weights to the channels-last memory format, and clears the previous evaluation."""
        # The Trainer skips a loop without batches. The previous result may belong to another split.
        self.evaluation = None
        self.net.to(memory_format=torch.channels_last)

    def teardown(self, stage: str) -> None:
        """Converts the weights back to the contiguous format, which safetensors requires."""
        self.net.to(memory_format=torch.contiguous_format)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its learning-rate schedule, which is stepped after each optimizer step."""
        steps = schedule_length(self.settings, self.total_steps or self.trainer.estimated_stepping_batches)
        if reason := explain_peak(self.settings, self.trainer.world_size, steps):
            rank_zero_info(reason)
        optimizer = make_optimizer(self.net, self.settings, peak_lr(self.settings, self.trainer.world_size, steps))
        # The GradScaler skips a step whose gradient overflowed. The hook does not run for a skipped step.
        optimizer.register_step_post_hook(self._count_step)
        schedule = make_schedule(optimizer, self.settings, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _count_step(self, *_: Any) -> None:
        self.optimizer_steps += 1

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """Advances the schedule, unless the optimizer step was skipped."""
        if scheduler.last_epoch < self.optimizer_steps:
            scheduler.step()

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        """Returns the loss and the logits of a micro-batch."""
        batch = Batch.from_loader(batch)
        logits = self.net(batch.images, batch.rng or make_rng(self.hparams["seed"], self.trainer, batch))
        loss = mean_loss(logits, batch.targets, self.settings.label_smoothing)
        self.log_training(loss, logits, batch.targets, batch_idx)
        # The Trainer divides by the length of a full accumulation window; the last window of an epoch may be shorter.
        window_length = accumulation_window(self.trainer, batch_idx)
        loss = accumulated_loss(loss, window_length, self.trainer.accumulate_grad_batches)
        return {"loss": loss, "logits": logits.detach()}

    def log_training(self, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, batch_idx: int) -> None:
        """Logs the loss and the accuracy over all ranks, and the learning rate, every `log_every_n_steps` steps."""
        self.train_metrics.update(loss)
        if self.train_metrics.is_logged(self.trainer, batch_idx):
            lr = self.trainer.optimizers[0].param_groups[0]["lr"]
            self._log({**self.train_metrics.compute(logits, targets), "lr": lr})

    def on_validation_epoch_start(self) -> None:
        """Synchronizes the buffers, so that all ranks evaluate the same network."""
        sync_buffers(self.net)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Updates this rank's metrics."""
        batch = Batch.from_loader(batch)
        self.metrics.update(self(batch.images), batch.targets)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Updates this rank's metrics and examples."""
        batch = Batch.from_loader(batch)
        logits = self(batch.images)
        self.metrics.update(logits, batch.targets)
        self.examples.add(logits, batch.targets, batch.indices)

    def on_validation_epoch_end(self) -> None:
        """Reduces the metrics across ranks, and logs them."""
        evaluation = self.metrics.evaluation()
        self.metrics.reset()
        if not self.trainer.sanity_checking:
            self.evaluation = evaluation
            check_count(self.trainer, evaluation.count)
            metrics = name_metrics(evaluation, "test" if self.trainer.testing else "val")
            # The values are equal on all ranks. The maximum is exact; a mean would be rounded.
            self._log(metrics, sync_dist=True, reduce_fx="max")

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Any, batch_idx: int) -> Prediction:
        """Returns the sample indices (if the loader provides them), the predicted classes and their probabilities."""
        # A predict loader may yield images without targets.
        batch = Batch.from_loader((batch, batch) if isinstance(batch, torch.Tensor) else batch)
        return batch.indices, *predict_with_probability(self(batch.images))

    def _log(self, metrics: dict[str, float], **options: Any) -> None:
        # Double precision represents each value exactly.
        for name, value in metrics.items():
            self.log(name, torch.tensor(value, dtype=torch.float64, device=self.device), **options)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Self:
        """Loads a checkpoint, or the best one of a run folder, verified and without executing pickled code."""
        if kwargs.get("weights_only") is False:
            raise InputError("A checkpoint never executes code: weights_only=False is not available.")
        path = find_verified_checkpoint(Path(checkpoint_path), rank_zero_warn)
        return super().load_from_checkpoint(path, *args, **{**kwargs, "weights_only": True})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the number of optimizer steps, and makes the weights contiguous."""
        # Keep this key for compatibility with older checkpoints.
        checkpoint["steps_made"] = self.optimizer_steps
        checkpoint["state_dict"] = {name: tensor.contiguous() for name, tensor in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restores the number of optimizer steps."""
        self.optimizer_steps = checkpoint["steps_made"]
