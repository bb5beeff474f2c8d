"""The progress display of a Trainer."""

from __future__ import annotations

from lightning.pytorch.callbacks import ProgressBar

from lit_mnist.run.progress import ProgressDisplay


class RunProgressBar(ProgressBar):
    """Displays the training progress: a bar on a terminal, otherwise a line every few seconds.

    `StepMonitorCallback` passes the metrics to the display, and `RunCheckpoint` shows an epoch once it is saved.

    Attributes:
        display: The display on rank 0 during a training, otherwise None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.display: ProgressDisplay | None = None
        self.is_enabled = True

    def disable(self) -> None:
        """Disables the display on this rank."""
        self.is_enabled = False

    def enable(self) -> None:
        """Enables the display on this rank."""
        self.is_enabled = True
