"""A job: what each rank computes, validated and loaded once by the parent process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from lit_mnist.data.dataset import Dataset, Split
from lit_mnist.data.loader import EvaluationBatches, TrainBatches
from lit_mnist.data.sampler import validation_split
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import Rank
from lit_mnist.experiment import Command, Experiment
from lit_mnist.experiment.plan import Plan, make_plan
from lit_mnist.models.build import build_net
from lit_mnist.training.precision import UsedPrecision, weight_dtype


@dataclass(frozen=True)
class Splits:
    """The samples that an experiment trains, validates and tests on."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class Job:
    """Everything that a rank needs to know.

    Attributes:
        command: `train` (fit, then test the best weights), `fit`, `validate`, `test` or `predict`.
        engine: Name of the engine.
        experiment: The configured experiment.
        dataset: The data set, loaded and verified.
        splits: The samples to train, validate and test on.
        plan: Batches and steps.
        devices: Devices of this machine.
        precision: The precision to use.
        threads: Threads per rank.
        folder: The run folder.
        command_line: The command line of the user.
        first_process: ID of the process whose start is the start of the run.
        checkpoint: The checkpoint to resume from or to evaluate.
        weights: Initial weights, keyed by parameter name, which replace the random ones.
        files: The user's images to predict instead of the test set; `splits.test` contains them.
        extras: Creates the further options of Lightning's Trainer.
        stated: The further options as the configuration states them.
        cuda_graph: Whether the passes of a micro-batch run as a CUDA graph.
        resumable: Whether the engine can resume its runs.
        testable: Whether the engine has the command `test`.
        imports: The user's packages of `--import`, which a rank in a new process imports first.
    """

    command: Command
    engine: str
    experiment: Experiment
    dataset: Dataset
    splits: Splits
    plan: Plan
    devices: Devices
    precision: UsedPrecision
    threads: int
    folder: Path
    command_line: str
    first_process: int
    checkpoint: Path | None = None
    weights: Mapping[str, torch.Tensor] | None = None
    files: tuple[Path, ...] = ()
    extras: Callable[[], dict[str, Any]] | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)
    cuda_graph: bool = False
    resumable: bool = False
    testable: bool = False
    imports: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the job trains."""
        return self.command in {"train", "fit"}

    @property
    def import_flag(self) -> str:
        """The flag `--import` with a space before it, for a command that continues this run; empty without packages."""
        return f" --import {','.join(self.imports)}" if self.imports else ""

    @property
    def sync_batchnorm(self) -> bool:
        """Whether batch norm uses the statistics of all ranks, which is the default for several ranks."""
        return self.plan.world_size > 1 and self.experiment.trainer.sync_batchnorm is not False

    def build_net(self, device: torch.device) -> nn.Module:
        """Returns the network on a device. All ranks have the same initial weights, which depend on the seed alone."""
        net = build_net(
            self.experiment.model,
            num_classes=self.dataset.num_classes,
            seed=self.experiment.seed_everything,
            weights=self.weights,
        )
        return net.to(device, weight_dtype(self.precision)).to(memory_format=torch.channels_last)

    def train_batches(self, rank: Rank, epoch: int, step: int) -> TrainBatches:
        """Returns the micro-batches of a rank in an epoch, beginning after `step` optimizer steps of the run."""
        current, first = self.plan.position(step)
        return TrainBatches(
            self.splits.train,
            plan=self.plan,
            settings=self.experiment.data,
            seed=self.experiment.seed_everything,
            epoch=epoch,
            rank=rank.rank,
            first=first if epoch == current else 0,
            dtype=weight_dtype(self.precision),
            device=self.devices.of(rank),
        )

    def evaluation_batches(self, split: Split, rank: Rank) -> EvaluationBatches:
        """Returns the batches that a rank evaluates of a split."""
        data = self.experiment.data
        return EvaluationBatches(
            split,
            rank=rank.rank,
            world_size=rank.world_size,
            batch_size=data.evaluation_batch,
            settings=data,
            dtype=weight_dtype(self.precision),
            device=self.devices.of(rank),
        )


def split_dataset(experiment: Experiment, dataset: Dataset, command: Command = "train") -> Splits:
    """Returns the samples to train, validate and test on.

    Args:
        experiment: The experiment.
        dataset: The data set.
        command: The command that uses the samples. `predict` predicts the test split.

    Raises:
        InputError: No training samples remain after the validation split, or a limit leaves no batch of a split that
            the command evaluates.
    """
    data, tests = experiment.data, len(dataset.test)
    stage: Literal["test", "predict"] = "predict" if command == "predict" else "test"
    # As in Lightning, a limit of 0 turns the validation of a training off.
    validates = command == "validate" or (command in {"train", "fit"} and experiment.trainer.limit_of("val") != 0)
    train, validation = validation_split(experiment.seed_everything, len(dataset.train), data.val_size)
    of_validation = _limit(experiment, "val", len(validation), required=validates)
    tested = command in {"train", "test", "predict"}
    of_test = _limit(experiment, stage, min(data.test_size or tests, tests), required=tested)
    return Splits(
        train=dataset.train.take(train[: data.train_size]),
        validation=dataset.train.take(validation[:of_validation]),
        test=dataset.test.take(np.arange(of_test)),
    )


def _limit(experiment: Experiment, stage: Literal["val", "test", "predict"], samples: int, *, required: bool) -> int:
    # The limits of the Trainer count batches over all ranks.
    size = experiment.data.evaluation_batch
    return min(samples, size * experiment.trainer.limit(stage, math.ceil(samples / size), required=required))


def plan_for(experiment: Experiment, splits: Splits, world_size: int) -> Plan:
    """Returns the plan of a job; see `make_plan`."""
    return make_plan(experiment, world_size, len(splits.train))
