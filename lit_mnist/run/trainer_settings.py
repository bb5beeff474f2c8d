"""The section `trainer`: the options of Lightning's Trainer that every engine supports."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import InputError, require
from lit_mnist.run.bounds import check_bounds

Precision = Literal["auto", "32-true", "64-true", "16-mixed", "bf16-mixed"]
Stage = Literal["train", "val", "test", "predict"]
_BATCHES = {
    "train": "an epoch",
    "val": "the validation split",
    "test": "the test split",
    "predict": "the samples to predict",
}


@dataclass(frozen=True)
class TrainerSettings:
    """The options of Lightning's Trainer that every engine supports, under the same names.

    Args:
        max_epochs: Epochs to train.
        max_steps: Maximum number of optimizer steps; -1 for no limit.
        accelerator: `cpu`, `gpu`, or `auto`: GPUs if there are any.
        devices: Number of ranks on this machine, a list of GPU numbers, or `auto`: all GPUs, or one rank on a CPU.
        num_nodes: Number of machines; more than one requires an outside launcher.
        strategy: `auto` or `ddp`: both use distributed data parallel training if there are several ranks.
        precision: `32-true`, `64-true`, `16-mixed`, `bf16-mixed`, or `auto`: 16-mixed on GPUs; on CPUs bf16-mixed if
            the processor computes it faster than float32, otherwise 32-true.
        sync_batchnorm: Whether batch norm uses the statistics of all ranks. Unset: if there are several ranks.
        accumulate_grad_batches: Micro-batches per optimizer step.
        gradient_clip_val: Largest norm of the gradient. Unset: no clipping.
        deterministic: Whether to use deterministic algorithms only.
        limit_train_batches: Batches of an epoch: a number, or a share from 0.0 to 1.0. Unset: all.
        limit_val_batches: Batches of the validation split, over all ranks: a number, or a share. Unset: all.
        limit_test_batches: Batches of the test split, over all ranks: a number, or a share. Unset: all.
        limit_predict_batches: Batches to predict, over all ranks: a number, or a share. Unset: all.
        overfit_batches: Trains and validates on this many batches (a number, or a share), the same in each epoch.
        fast_dev_run: Runs one batch (`true`), or a number of batches, of each split in one epoch, to try the code.
        check_val_every_n_epoch: Epochs between two validations; the best weights are chosen among those validated.
        log_every_n_steps: Optimizer steps between two logs of the training metrics.
        enable_progress_bar: Whether to show a progress bar.
    """

    max_epochs: int = 1
    max_steps: int = -1
    accelerator: Literal["auto", "cpu", "gpu"] = "auto"
    devices: int | list[int] | Literal["auto"] = "auto"
    num_nodes: int = 1
    strategy: Literal["auto", "ddp"] = "auto"
    precision: Precision = "auto"
    sync_batchnorm: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    deterministic: bool = False
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0
    fast_dev_run: bool | int = False
    check_val_every_n_epoch: int = 1
    log_every_n_steps: int = 50
    enable_progress_bar: bool = True

    def __post_init__(self) -> None:
        check_bounds("trainer", self, "max_epochs", "num_nodes", "accumulate_grad_batches", low=1)
        check_bounds("trainer", self, "check_val_every_n_epoch", "log_every_n_steps", low=1)
        require(
            self.max_steps == -1 or self.max_steps >= 1,
            f"trainer.max_steps must be at least 1, or -1 for no limit, but is {self.max_steps}.",
        )
        if isinstance(self.devices, list):
            require(len(self.devices) >= 1, "trainer.devices is an empty list: name at least one device.")
            require(
                len(set(self.devices)) == len(self.devices) and min(self.devices) >= 0,
                f"trainer.devices must list different device numbers from 0, but is {self.devices}.",
            )
        elif self.devices != "auto":
            check_bounds("trainer", self, "devices", low=1)
        require(
            self.gradient_clip_val is None or 0 < self.gradient_clip_val < math.inf,
            f"trainer.gradient_clip_val must be above 0 and finite, or unset, but is {self.gradient_clip_val}.",
        )
        require(
            self.fast_dev_run >= 0, f"trainer.fast_dev_run must be true, false or a number, not {self.fast_dev_run}."
        )
        for name in (*(f"limit_{stage}_batches" for stage in ("train", "val", "test", "predict")), "overfit_batches"):
            limit = getattr(self, name)
            fits = limit is None or (0 <= limit <= 1 if isinstance(limit, float) else limit >= 0)
            require(fits, f"trainer.{name} must be a number of batches, or a share from 0.0 to 1.0, but is {limit}.")

    def limit_of(self, stage: Stage) -> int | float | None:
        """Returns the limit of the batches of a stage; `fast_dev_run` and `overfit_batches` override it."""
        limit: int | float | None = getattr(self, self._limiting_option(stage))
        return int(limit) if isinstance(limit, bool) else limit

    def limit(self, stage: Stage, batches: int, *, required: bool = True) -> int:
        """Applies the limit of a stage, a number or a share from 0.0 to 1.0, to a number of batches.

        Raises:
            InputError: Batches are required, but the limit leaves none.
        """
        limit = self.limit_of(stage)
        if limit is None:
            return batches
        left = int(batches * limit) if isinstance(limit, float) else min(batches, limit)
        if required and batches and not left:
            raise InputError(
                f"trainer.{self._limiting_option(stage)} {limit} leaves none of the {batches} batches of "
                f"{_BATCHES[stage]}: raise it."
            )
        return left

    def _limiting_option(self, stage: Stage) -> str:
        if self.fast_dev_run:
            return "fast_dev_run"
        return "overfit_batches" if self.overfit_batches and stage in {"train", "val"} else f"limit_{stage}_batches"
