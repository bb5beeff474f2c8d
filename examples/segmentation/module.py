"""The LightningModule: DeepLabV3, a loss over the valid pixels of all ranks, and the mean IoU."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassJaccardIndex
from torchvision.models import resnet18, segmentation
from torchvision.models.feature_extraction import create_feature_extractor
from torchvision.models.segmentation.deeplabv3 import DeepLabHead

from lit_mnist.models import SeededDropout, seed_dropout
from lit_mnist.order import derive_seed

Net = Literal["deeplabv3_resnet101", "deeplabv3_resnet50", "small"]
Batch = tuple[torch.Tensor, torch.Tensor]
IGNORED = 255  # the class of a pixel that does not count, such as the border of an object in Pascal VOC


class LitSegmentation(LightningModule):
    """Predicts a class for every pixel; a batch is (images float32 [batch, 3, height, width], classes int64).

    Args:
        num_classes: Number of classes, with the background.
        net: torchvision's DeepLabV3 from random weights, or `small`, which trains on a CPU in minutes.
        lr: Learning rate at the start; it falls to 0 as the power 0.9 of the remaining steps.
        momentum: Momentum of SGD.
        weight_decay: Weight decay, an L2 penalty.
        seed: Seed of the initial weights and of dropout; by default that of `seed_everything`.
    """

    def __init__(
        self,
        num_classes: int,
        net: Net = "small",
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seed = torch.initial_seed() if seed is None else seed
        self.net = make_net(net, num_classes, self.seed)
        # Logged as objects, they add up pixels over the ranks. A mean of the ranks' means would be wrong.
        self.mean_iou = MulticlassJaccardIndex(num_classes, ignore_index=IGNORED)
        self.mean_loss = MeanMetric().set_dtype(torch.float64)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, num_classes, height, width]."""
        return self.net(images)["out"]

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Returns a loss whose mean over the ranks, which DDP computes, is the mean over all valid pixels.

        The ranks have equally many images, but not valid pixels: each divides its sum by the count of all ranks.
        """
        seed_dropout(self.net, self.seed, self.current_epoch * int(self.trainer.num_training_batches) + batch_idx)
        total, count = sum_over_pixels(self(batch[0]), batch[1])
        sums = self.trainer.strategy.reduce(torch.stack([total.detach(), count.to(total)]), reduce_op="sum")
        all_count = sums[1].clamp(min=1)
        self.log("train_loss", sums[0] / all_count, prog_bar=True)
        return total * self.trainer.world_size / all_count

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds a batch to the metrics."""
        self._evaluate(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds a batch to the metrics."""
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Returns the class of every pixel, uint8 [batch, height, width]."""
        return self(batch[0]).argmax(dim=1).to(torch.uint8)

    def configure_optimizers(self) -> Any:
        """Returns SGD and the polynomial schedule of DeepLab (Chen et al., 2017), stepped after each optimizer step."""
        hp = self.hparams
        optimizer = torch.optim.SGD(self.parameters(), hp.lr, hp.momentum, weight_decay=hp.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=steps, power=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _evaluate(self, batch: Batch, stage: str) -> None:
        logits = self(batch[0])
        total, count = sum_over_pixels(logits, batch[1])
        self.mean_iou.update(logits, batch[1])
        self.mean_loss.update(total / count.clamp(min=1), weight=count)
        self.log_dict({f"{stage}_mean_iou": self.mean_iou, f"{stage}_loss": self.mean_loss}, prog_bar=True)


def sum_over_pixels(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum of the cross-entropies of the valid pixels, in nats, and their number."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"), (targets != IGNORED).sum()


def make_net(net: Net, num_classes: int, seed: int) -> nn.Module:
    """Returns a network whose initial weights are a function of the seed, and its dropout one of the sample."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "weights"))
        if net == "small":
            # The first half of a ResNet-18, whose features have an eighth of the height and width of the image.
            features = create_feature_extractor(resnet18(), {"layer2": "out"})
            model: nn.Module = segmentation.DeepLabV3(features, DeepLabHead(128, num_classes))
        else:
            model = getattr(segmentation, net)(weights=None, weights_backbone=None, num_classes=num_classes)
    # torch's dropout draws other masks on another number of ranks.
    pyramid = model.classifier[0].project
    pyramid[-1] = SeededDropout(pyramid[-1].p, layer=1)
    return model
