"""Trains the template under one Trainer, and prints images per second: `python -m benchmarks.trainers NAME DEVICES`.

`stock` is Lightning's Trainer, and `lit` is LitTrainer, which adds the plugins. Both save and log as often. On several
CPU ranks, only LitTrainer has synchronized batch norm; `lit_without_sync` leaves it out.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lit_mnist import LitClassifier, LitTrainer, MNISTDataModule

STEPS, WARM_UP_STEPS, BATCH_SIZE = 400, 20, 64


class Clock(Callback):
    """Notes the end of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Notes the end of a step."""
        self.ends.append(time.perf_counter())

    def images_per_s(self) -> float:
        """Returns the samples of all ranks over the median step after the warm-up."""
        steps = [end - begin for begin, end in zip(self.ends, self.ends[1:], strict=False)]
        return BATCH_SIZE / statistics.median(steps[WARM_UP_STEPS:])


def main(name: str, devices: int) -> None:
    """Trains, and prints the result as JSON."""
    seed_everything(42, verbose=False)
    if devices > 1:
        torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": devices,
            "precision": "32-true",
            "max_steps": STEPS,
            "limit_val_batches": 0,
            "callbacks": [clock],
            "default_root_dir": folder,
            "enable_progress_bar": False,
        }
        if name == "stock":
            options["callbacks"].append(
                ModelCheckpoint(f"{folder}/checkpoints", every_n_train_steps=100, save_last=True)
            )
            options["logger"] = [CSVLogger(folder), TensorBoardLogger(folder)]
            trainer = Trainer(strategy="ddp" if devices > 1 else "auto", use_distributed_sampler=False, **options)
        else:
            trainer = LitTrainer(sync_batchnorm=name == "lit", **options)
        trainer.fit(LitClassifier(), MNISTDataModule(batch_size=BATCH_SIZE))
        if trainer.is_global_zero:
            print(json.dumps({"images_per_s": clock.images_per_s()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
