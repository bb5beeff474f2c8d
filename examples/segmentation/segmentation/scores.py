"""The best and the worst test images, as images of the report."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from PIL import Image
from torchmetrics import CatMetric

from lit_mnist.errors import InputError
from segmentation.dataset import SegmentationDataset
from segmentation.images import IGNORED
from segmentation.palette import tint

# Images of each kind.
KEPT = 6
FOLDER = "images"


class BestAndWorst(Callback):
    """Writes the test images with the best and the worst mean IoU into `images/` of the run folder.

    Each file shows the image, the image with its true classes, and with its predicted classes.
    """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Gathers the scores of all ranks. Rank 0 predicts the chosen images again, and writes them."""
        metric = cast(CatMetric, pl_module.scores)
        scores = metric.compute()
        metric.reset()
        if not trainer.is_global_zero:
            return
        folder = Path(trainer.default_root_dir) / FOLDER
        folder.mkdir(exist_ok=True)
        for kind, rows in best_and_worst(scores.view(-1, 2).cpu()).items():
            for place, (index, score) in enumerate(rows, start=1):
                name = f"{kind} {place}, mean IoU {score:.1%}"
                self._show(trainer, pl_module, int(index)).save(folder / f"{name}.jpg", quality=85)

    def _show(self, trainer: Trainer, module: LightningModule, index: int) -> Image.Image:
        dataset: SegmentationDataset = cast(Any, trainer.test_dataloaders).dataset
        sample = dataset[index]
        if isinstance(sample, InputError):
            raise sample
        # `forward` has no collectives in evaluation.
        with torch.inference_mode(), trainer.precision_plugin.forward_context():
            predicted = module(sample[0][None].to(module.device)).argmax(dim=1)[0].to(torch.uint8).cpu().numpy()
        image, mask = (np.asarray(part) for part in dataset.read(index))
        return Image.fromarray(np.concatenate([image, tint(image, mask), tint(image, predicted)], axis=1))


def image_scores(predicted: torch.Tensor, targets: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Returns the mean IoU of each image, float64 [batch]; -1 for an image without a valid pixel.

    Args:
        predicted: Predicted classes, int64 [batch, height, width].
        targets: True classes, int64 [batch, height, width]; pixels of class `IGNORED` do not count.
        num_classes: Number of classes.
    """
    batch = len(predicted)
    valid = targets != IGNORED
    image = torch.arange(batch, device=predicted.device).view(-1, 1, 1).expand_as(targets)
    cells = (image * num_classes + targets) * num_classes + predicted
    counts = cells[valid].bincount(minlength=batch * num_classes**2).view(batch, num_classes, num_classes).double()
    both = counts.diagonal(dim1=1, dim2=2)
    either = counts.sum(dim=1) + counts.sum(dim=2) - both
    classes = (either > 0).sum(dim=1)
    return torch.where(classes > 0, (both / either.clamp(min=1)).sum(dim=1) / classes.clamp(min=1), -1.0)


def best_and_worst(scores: torch.Tensor) -> dict[str, list[list[float]]]:
    """Returns the best images, best first, and the worst, worst first, each once.

    Args:
        scores: The index and the score of each image, float64 [images, 2]; images with a negative score do not count.
    """
    ordered = sorted((row for row in scores.tolist() if row[1] >= 0), key=lambda row: (-row[1], row[0]))
    half = min(KEPT, (len(ordered) + 1) // 2)
    return {"best": ordered[:half], "worst": ordered[::-1][: min(KEPT, len(ordered) - half)]}
