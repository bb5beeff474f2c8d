"""The same buffers on all ranks in an evaluation."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lit_mnist.distributed.buffers import sync_buffers


class SynchronizedBuffers(Callback):
    """Broadcasts the buffers of rank 0 before each evaluation, so that all ranks evaluate the network that is saved.

    Without synchronized batch norm, each rank has the running statistics of its own samples. With
    `DDPStrategy(broadcast_buffers=False)`, which saves a broadcast in each step, nothing else makes them equal:

        trainer = Trainer(strategy=DDPStrategy(broadcast_buffers=False), callbacks=[SynchronizedBuffers()])

    Every rank must have at least one batch of the evaluation, or train under `LitTrainer`.
    """

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Broadcasts the buffers."""
        sync_buffers(pl_module)

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
