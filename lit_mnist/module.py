"""The LightningModule: the network, its loss, its optimizer and its exact metrics."""

from __future__ import annotations

import inspect
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lit_mnist.data.loader import Batch, EvaluationBatches
from lit_mnist.data.randomness import Draw
from lit_mnist.errors import require
from lit_mnist.experiment import ModelSettings
from lit_mnist.models.build import build_net
from lit_mnist.models.sync_batch_norm import share_buffers
from lit_mnist.plan import scaled_lr
from lit_mnist.seams import PlainHookName
from lit_mnist.training.checkpoint import BEST, LAST, SECTION, find_checkpoint, read_checkpoint
from lit_mnist.training.cuda_graph import GraphedPasses
from lit_mnist.training.evaluation import Evaluation, ExactMetrics, predictions_of
from lit_mnist.training.examples import Example
from lit_mnist.training.loss import mean_loss
from lit_mnist.training.optimizer import accumulated_loss, make_optimizer
from lit_mnist.training.schedule import make_schedule


class LitClassifier(PlainHookName, LightningModule):
    """A classifier of pictures, or of their pixels; `LitClassifier.load_from_checkpoint(RUN)` gives a trained one.

    It takes the batches of `MNISTDataModule`, and those of any loader: (images, targets), where the images are
    normalised, float [batch, channels, height, width], and the targets int64 [batch], or [batch, height, width].

    Args:
        num_classes: Number of classes.
        seed: Seed of the initial weights and of dropout.
        **kwargs: The settings of `ModelSettings`.

    Attributes:
        total_steps: Optimizer steps of the run, for the learning rate; unset: as many as the Trainer tells.
        validation: The last evaluation on the validation split.
        tested: The last evaluation on the test split.
    """

    total_steps: int | None = None

    def __init__(self, num_classes: int = 10, seed: int = 42, **kwargs: Any) -> None:
        super().__init__()
        self.settings = ModelSettings(**kwargs)
        self.save_hyperparameters({"num_classes": num_classes, "seed": seed, **asdict(self.settings)})
        self.net: nn.Module = build_net(self.settings, num_classes=num_classes, seed=seed)
        self.metrics = ExactMetrics(num_classes)
        self.validation: Evaluation | None = None
        self.tested: Evaluation | None = None
        self.examples: list[Example] = []
        self.steps_made = 0
        self.rate = 0.0
        self.loss = torch.tensor(0.0)
        self._graphed: GraphedPasses | None = None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, classes, ...], of normalised pictures, [batch, channels, height, width]."""
        return self.net(images)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **kwargs: Any,
    ) -> Self:
        """Returns the module of a verified checkpoint; nothing that the file holds is executed.

        Args:
            checkpoint_path: A checkpoint, or a run folder, which means its best one.
            map_location: As of Lightning's method, like all others.
            hparams_file: See there.
            strict: See there.
            weights_only: Always true.
            **kwargs: See there.

        Raises:
            InputError: The file is missing, damaged, or not a checkpoint of this project.
        """
        path = find_checkpoint(Path(checkpoint_path), (BEST, LAST))
        if SECTION not in read_checkpoint(path, hashed=False):
            rank_zero_warn(f"{path} has no SHA-256, since a Trainer wrote it by itself: it was not verified.")
        if path.name == LAST and Path(checkpoint_path).is_dir():
            rank_zero_warn(f"{checkpoint_path} holds no {BEST}: {path} is loaded.")
        return super().load_from_checkpoint(path, map_location, hparams_file, strict, weights_only=True, **kwargs)

    # --- training

    def setup(self, stage: str) -> None:
        """Begins to count, and puts the weights into channels-last format, in which they compute fastest."""
        self.net.to(memory_format=torch.channels_last)
        if stage == "fit":
            # A checkpoint's count comes afterwards.
            self.steps_made = 0

    def teardown(self, stage: str) -> None:
        """Leaves contiguous weights, which other programs and formats such as safetensors expect."""
        self.net.to(memory_format=torch.contiguous_format)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer, and its schedule over the steps of the run."""
        settings = replace(self.settings, lr=scaled_lr(self.settings, self.trainer.world_size))
        optimizer = make_optimizer(self.net, settings)
        schedule = make_schedule(optimizer, self.settings, self._length())
        # Only a step that the optimizer makes gets here: the GradScaler leaves out one whose gradient overflowed.
        optimizer.register_step_post_hook(self._step_made)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _step_made(self, *_: Any) -> None:
        self.steps_made += 1

    def _length(self) -> int:
        """Returns the optimizer steps of the run.

        Raises:
            InputError: The run has no end, but its schedule needs one.
        """
        steps = self.total_steps or self.trainer.estimated_stepping_batches
        if 0 < steps < math.inf:
            return int(steps)
        endless = self.settings.schedule == "constant" and not self.settings.warmup
        require(endless, f"model.schedule {self.settings.schedule} needs a last step: give max_epochs or max_steps.")
        return 1

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        """Returns the loss of a micro-batch, weighed so that a shorter last window is a mean over its samples, too."""
        if self._graphed:
            self.loss, logits = self._graphed(batch)
            return {"loss": self.loss, "logits": logits}
        batch = Batch.of(batch)
        logits, loss = self._forward(batch if batch.draw else batch._replace(draw=self._draw(len(batch.images))))
        accumulate = self.trainer.accumulate_grad_batches
        window = min(accumulate, self.trainer.num_training_batches - batch_idx + batch_idx % accumulate)
        weighed = accumulated_loss(loss, int(window), accumulate)
        self.loss = loss.detach()
        return {"loss": weighed, "logits": logits.detach()}

    def _forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch.images, batch.draw)
        return logits, mean_loss(logits, batch.targets, self.settings.label_smoothing)

    def _draw(self, samples: int) -> Draw:
        """Returns which random numbers are this rank's, for a micro-batch whose loader names none."""
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        rows = torch.arange(rank * samples, (rank + 1) * samples, device=self.device)
        number = self.trainer.fit_loop.total_batch_idx
        return Draw(seed=self.hparams["seed"], number=number, size=world_size * samples, rows=rows)

    def graph_passes(self) -> None:
        """Lets a GPU be given both passes of a step as one graph; without accumulation only, see `GraphedPasses`."""
        self._graphed = GraphedPasses(self._passes, self.net.parameters())

    def _passes(self, batch: Batch, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        logits, loss = self._forward(batch)
        weighed = accumulated_loss(loss, window, 1)
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # A training step is in autocast, its backward pass is not.
        with torch.autocast(loss.device.type, enabled=False):
            (scaler.scale(weighed) if scaler else weighed).backward()
        return loss.detach(), logits.detach()

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Makes the backward pass, unless it was made with the forward pass."""
        if self._graphed:
            self._graphed.leave_gradients()
        else:
            super().backward(loss, *args, **kwargs)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Notes the learning rate of the step that comes."""
        self.rate = optimizer.param_groups[0]["lr"]

    def lr_scheduler_step(self, scheduler: LRScheduler, metric: Any) -> None:
        """Moves the schedule on, unless the optimizer's step was left out."""
        if scheduler.last_epoch < self.steps_made:
            scheduler.step()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds the number of steps that the optimizer made, and makes the weights contiguous."""
        checkpoint["steps_made"] = self.steps_made
        checkpoint["state_dict"] = {name: tensor.contiguous() for name, tensor in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Takes the number of steps that the optimizer made."""
        self.steps_made = checkpoint["steps_made"]

    # --- evaluation: sums on each rank, put together once

    def on_validation_epoch_start(self) -> None:
        """Lets all ranks evaluate one network."""
        share_buffers(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch to the sums."""
        batch = Batch.of(batch)
        self.metrics.update(self.net(batch.images), batch.targets)

    def on_validation_epoch_end(self) -> None:
        """Puts the ranks' sums together."""
        evaluation = self._evaluated("val", self.trainer.val_dataloaders, self.trainer.limit_val_batches)
        # The sanity check is of a few batches, and of no training.
        self.validation = self.validation if self.trainer.sanity_checking else evaluation

    def on_test_epoch_start(self) -> None:
        """Lets all ranks evaluate one network."""
        share_buffers(self.net)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch to the sums, and notes what is shown of it."""
        batch = Batch.of(batch)
        self.metrics.update(self.net(batch.images), batch.targets, batch.indices if len(batch.indices) else None)

    def on_test_epoch_end(self) -> None:
        """Puts the ranks' sums and examples together."""
        self.examples = self.metrics.examples()
        self.tested = self._evaluated("test", self.trainer.test_dataloaders, self.trainer.limit_test_batches)

    def _evaluated(self, stage: str, loader: object, limit: float) -> Evaluation:
        """Puts the ranks' sums together, and logs what comes of them for loggers and callbacks, under `stage`_NAME."""
        # A limit of 1 is a batch, one of 1.0 the whole.
        whole = isinstance(limit, float) and limit == 1.0 and not self.trainer.sanity_checking
        evaluation = self.metrics.compute(
            len(loader.split) if whole and isinstance(loader, EvaluationBatches) else None
        )
        self.metrics.reset()
        for name in ("loss", "accuracy", "mean_iou"):
            if (value := getattr(evaluation, name)) is not None:
                # Of equal values the largest is each of them, exactly; a mean over the ranks would round.
                exact = torch.tensor(value, dtype=torch.float64, device=self.device)
                self.log(f"{stage}_{name}", exact, sync_dist=True, reduce_fx="max")
        return evaluation

    def on_predict_epoch_start(self) -> None:
        """Lets all ranks predict with one network."""
        share_buffers(self.net)

    def predict_step(self, batch: Any, batch_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns the samples' numbers, int64 [batch], and what `predictions_of` says of them.

        Of a user's own loader, which may also give images alone, the numbers are not known, int64 [0].
        """
        batch = Batch.of([batch, batch] if isinstance(batch, torch.Tensor) else batch)
        return batch.indices, *predictions_of(self.net(batch.images))


# Lightning asks at each step whether `training_step` takes the batch's number, which Python would work out anew.
LitClassifier.training_step.__signature__ = inspect.signature(LitClassifier.training_step)  # type: ignore[attr-defined]
