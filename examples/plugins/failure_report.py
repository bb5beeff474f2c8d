"""FailureReport: a module fails in its sixth batch, and the report names the rank, the step and the samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from examples.plugins.classifier import Classifier, options, points
from lit_mnist.plugins import FailureReport


class FailingClassifier(Classifier):
    """Finds bad data in its sixth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss of a batch, or fails."""
        if batch_idx == 5:
            raise ValueError("this batch has bad data")
        return super().training_step(batch, batch_idx)


def main(folder: str) -> None:
    """Trains until the failure, and prints a part of the report."""
    trainer = Trainer(**options(devices=1), enable_checkpointing=False, callbacks=[FailureReport(folder)])
    try:
        trainer.fit(FailingClassifier(), DataLoader(points(1024, seed=1), batch_size=16))
    except ValueError:
        report = json.loads((Path(folder) / "failure.json").read_text())
        print(f"rank {report['rank']} failed in step {report['step']} with the samples {report['samples']['indices']}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "failures")
