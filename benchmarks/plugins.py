"""A stock Trainer on two ranks, with or without the plugins; the last line that it prints is JSON.

    python -m benchmarks.plugins
    python -m benchmarks.plugins --with-plugins

ConvNet on MNIST in batches that are selected as a whole, 400 steps of 32 images on each rank, a checkpoint at the end,
no validation. The plugins are those that change no number of this training.
"""

import json
import sys
import tempfile
import time

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lit_mnist import LitClassifier
from lit_mnist.mnist import Digits, load, whole_batch
from lit_mnist.plugins import (
    ExactAccumulation,
    ExactCheckpoint,
    ExactDDPStrategy,
    ExactEvaluation,
    FailureReport,
    ResumableDataLoader,
    StopOnNonFinite,
    StopTogether,
    VerifiedCheckpointIO,
)

STEPS, BATCH_SIZE, WARM_UP_STEPS = 400, 32, 20


class Clock(Callback):
    """Takes the time from the end of the warm-up to the end of the last step."""

    began = seconds = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Reads the clock."""
        if trainer.global_step == WARM_UP_STEPS:
            self.began = time.perf_counter()
        self.seconds = time.perf_counter() - self.began


def main() -> None:
    """Trains, and prints the images per second of all ranks."""
    exact = "--with-plugins" in sys.argv
    loader_type = ResumableDataLoader if exact else DataLoader
    loader = loader_type(Digits(load("mnist").train), BATCH_SIZE, shuffle=True, collate_fn=whole_batch)
    clock = Clock()
    callbacks = [ExactAccumulation(), ExactEvaluation(), StopTogether(), FailureReport(), StopOnNonFinite()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=2,
            max_steps=STEPS,
            strategy=ExactDDPStrategy() if exact else "ddp",
            use_distributed_sampler=not exact,
            plugins=[VerifiedCheckpointIO()] if exact else None,
            callbacks=[clock, *callbacks, ExactCheckpoint(folder)] if exact else [clock],
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        trainer.fit(LitClassifier(seed=0), loader)
        trainer.strategy.barrier()
    if trainer.is_global_zero:
        images = trainer.world_size * BATCH_SIZE * (STEPS - WARM_UP_STEPS)
        print(json.dumps({"images_per_s": images / clock.seconds}))


if __name__ == "__main__":
    main()
