"""The logger of a run folder."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lit_mnist.run.metrics_log import MetricsLog


class RunLogger(Logger):
    """Logs the metrics of a training run to `metrics.csv` and TensorBoard; test metrics go to `result.json`.

    Attributes:
        trainer: The Trainer, during a training run.
        log: The log files on rank 0 during a training run, otherwise None.
        validation: The metrics of the last validation, on rank 0.
    """

    def __init__(self) -> None:
        super().__init__()
        self.trainer: Trainer | None = None
        self.log: MetricsLog | None = None
        self.validation: dict[str, float] = {}

    @property
    def name(self) -> str:
        """Returns the name of the logger."""
        return "lit_mnist"

    @property
    def version(self) -> str:
        """Empty: the run folder has no version."""
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `config.yaml` in the run folder has the hyperparameters."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Logs the metrics of a step. A Trainer counts the steps from 0, the run folder from 1."""
        if self.log and self.trainer:
            if self.trainer.validating:
                self.validation = {name: value for name, value in metrics.items() if name != "epoch"}
            self.log.log_metrics(metrics, (step or 0) + 1)

    def finalize(self, status: str) -> None:
        """Closes the files at the end of the training."""
        if self.log:
            self.log.finalize(status)
            self.log = None
