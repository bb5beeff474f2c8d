"""The section `trainer`: the options of Lightning's Trainer that every engine understands."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from lit_mnist.errors import require

Precision = Literal["auto", "32-true", "64-true", "16-mixed", "bf16-mixed"]


@dataclass(frozen=True)
class TrainerSettings:
    """The part of Lightning's Trainer options that every engine understands, under the same names.

    Args:
        max_epochs: Epochs to train.
        max_steps: Optimizer steps to train at most; -1 for no limit beside the epochs.
        accelerator: `cpu`, `gpu`, or `auto`: GPUs where there are any.
        devices: Number of ranks on this machine, a list of GPU numbers, or `auto`: all GPUs, or one rank on a CPU.
        num_nodes: Number of machines; more than one needs an outside launcher.
        strategy: `auto` or `ddp`: distributed data parallel training where there are several ranks.
        precision: `32-true`, `64-true`, `16-mixed`, `bf16-mixed`, or `auto`: 16-mixed on GPUs; on CPUs bf16-mixed
            where the processor computes in it, else 32-true.
        sync_batchnorm: Whether batch norm uses the statistics of all ranks; unset: where there are several ranks.
        accumulate_grad_batches: Micro-batches of one optimizer step.
        gradient_clip_val: Largest norm of the gradient; unset: not clipped.
        deterministic: Whether only deterministic algorithms are allowed.
        limit_train_batches: Batches of an epoch: a number, or a share from 0.0 to 1.0; unset: all.
        limit_val_batches: Batches of the validation split, over all ranks: a number, or a share; unset: all.
        limit_test_batches: Batches of the test split, over all ranks: a number, or a share; unset: all.
        limit_predict_batches: Batches to predict, over all ranks: a number, or a share; unset: all.
        overfit_batches: Trains and validates on this many batches (a number, or a share): the same in each epoch.
        fast_dev_run: Runs one batch (`true`), or some, of each split in one epoch, to try the code.
        check_val_every_n_epoch: Epochs between two validations; the best weights are chosen among those validated.
        log_every_n_steps: Optimizer steps between two logs of the training metrics.
        enable_progress_bar: Whether the progress is shown.
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
        require(self.max_epochs >= 1, f"trainer.max_epochs must be at least 1, but is {self.max_epochs}.")
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
            require(self.devices >= 1, f"trainer.devices must be at least 1, but is {self.devices}.")
        require(self.num_nodes >= 1, f"trainer.num_nodes must be at least 1, but is {self.num_nodes}.")
        require(
            self.accumulate_grad_batches >= 1,
            f"trainer.accumulate_grad_batches must be at least 1, but is {self.accumulate_grad_batches}.",
        )
        require(
            self.gradient_clip_val is None or 0 < self.gradient_clip_val < math.inf,
            f"trainer.gradient_clip_val must be above 0 and finite, or unset, but is {self.gradient_clip_val}.",
        )
        for name in ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"):
            _check_limit(name, getattr(self, name))
        _check_limit("overfit_batches", self.overfit_batches)
        require(
            self.fast_dev_run >= 0, f"trainer.fast_dev_run must be true, false or a number, not {self.fast_dev_run}."
        )
        for name in ("check_val_every_n_epoch", "log_every_n_steps"):
            require(getattr(self, name) >= 1, f"trainer.{name} must be at least 1, but is {getattr(self, name)}.")

    def limit_of(self, stage: Literal["train", "val", "test", "predict"]) -> int | float | None:
        """Returns the limit of the batches of a stage, which `fast_dev_run` and `overfit_batches` set, too."""
        if self.fast_dev_run:
            return int(self.fast_dev_run)
        if self.overfit_batches and stage in {"train", "val"}:
            return self.overfit_batches
        limit: int | float | None = getattr(self, f"limit_{stage}_batches")
        return limit


def limited(batches: int, limit: int | float | None) -> int:
    """Returns how many of some batches a limit allows: a number of them, or a share from 0.0 to 1.0."""
    if limit is None:
        return batches
    return int(batches * limit) if isinstance(limit, float) else min(batches, limit)


def _check_limit(name: str, limit: int | float | None) -> None:
    fits = limit is None or (0 <= limit <= 1 if isinstance(limit, float) else limit >= 0)
    require(fits, f"trainer.{name} must be a number of batches, or a share from 0.0 to 1.0, but is {limit}.")
