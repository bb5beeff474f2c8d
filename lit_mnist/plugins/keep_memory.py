"""Memory that a step has freed, for the next step."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from lit_mnist.distributed.rank import keep_memory


class KeepMemory(Callback):
    """Lets a step on a CPU reuse the memory that the step before has freed.

    By default, glibc returns large blocks to the kernel when they are freed, and the kernel clears them again, page by
    page, in the next step:

        trainer = Trainer(callbacks=[KeepMemory()])

    It changes malloc for the whole process, until it ends: up to 1 GiB of freed memory stays with the process. It does
    nothing where the environment already sets malloc's thresholds, and with other C libraries.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets malloc's thresholds in this process."""
        keep_memory()
