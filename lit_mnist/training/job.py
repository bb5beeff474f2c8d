"""A job: what the command line hands to the ranks, checked and loaded once for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lit_mnist.data.dataset import AnySplit, Dataset
from lit_mnist.data.loader import EvaluationBatches, TrainBatches
from lit_mnist.data.sampler import validation_split
from lit_mnist.distributed.devices import Devices
from lit_mnist.distributed.rank import Rank
from lit_mnist.experiment import Command, Experiment
from lit_mnist.experiment.plan import Plan, make_plan
from lit_mnist.experiment.trainer import limited
from lit_mnist.training.precision import UsedPrecision, weight_dtype


@dataclass(frozen=True)
class Splits:
    """The samples that an experiment trains, validates and tests on."""

    train: AnySplit
    validation: AnySplit
    test: AnySplit


@dataclass(frozen=True)
class Job:
    """Everything that a rank needs to know.

    Attributes:
        command: `train` (fit, then test the best weights), `fit`, `validate`, `test` or `predict`.
        engine: Name of the engine.
        experiment: The experiment, as it was asked for.
        dataset: The data set, loaded and verified.
        splits: Its samples, as the experiment splits them.
        plan: Batches and steps.
        devices: Devices of this machine.
        precision: The precision to use.
        threads: Threads of each rank.
        folder: The run folder.
        command_line: The command as it was typed.
        first_process: The process from whose start times count.
        checkpoint: The checkpoint to resume from or to evaluate.
        weights: Weights to begin a training with, by name, in place of the random ones.
        files: The user's images, where they are predicted instead of the test set; they stand in `splits.test`.
        extras: Makes the further options of Lightning's Trainer.
        stated: What a configuration file says of them.
        cuda_graph: Whether a GPU is given the passes of a micro-batch as one recorded graph.
        resumable: Whether the engine can resume its runs.
        testable: Whether the engine has the command `test`.
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

    @property
    def trains(self) -> bool:
        """Whether the job trains."""
        return self.command in {"train", "fit"}

    @property
    def sync_batchnorm(self) -> bool:
        """Whether batch norm uses the statistics of all ranks: by default where there are several."""
        wanted = self.experiment.trainer.sync_batchnorm
        return self.plan.world_size > 1 and wanted is not False

    def train_batches(self, rank: Rank, epoch: int, step: int) -> TrainBatches:
        """Returns a rank's micro-batches of an epoch, from where a run stands after so many optimizer steps."""
        begun, first = self.plan.position(step)
        return TrainBatches(
            self.splits.train,
            plan=self.plan,
            settings=self.experiment.data,
            seed=self.experiment.seed_everything,
            epoch=epoch,
            rank=rank.rank,
            first=first if epoch == begun else 0,
            dtype=weight_dtype(self.precision),
            device=self.devices.of(rank),
        )

    def evaluation_batches(self, split: AnySplit, rank: Rank) -> EvaluationBatches:
        """Returns the batches of a split that a rank evaluates."""
        data = self.experiment.data
        return EvaluationBatches(
            split,
            rank=rank.rank,
            world_size=rank.world_size,
            batch_size=data.prediction_batch if self.command == "predict" else data.evaluation_batch,
            settings=data,
            dtype=weight_dtype(self.precision),
            device=self.devices.of(rank),
        )


def split_dataset(experiment: Experiment, dataset: Dataset, stage: Literal["test", "predict"] = "test") -> Splits:
    """Returns the samples to train, validate and test on.

    Args:
        experiment: The experiment.
        dataset: Its data set.
        stage: Whether the test split is there to be tested or predicted, which have limits of their own.

    Raises:
        InputError: The validation split leaves nothing to train on.
    """
    data, tests = experiment.data, len(dataset.test)
    train, validation = validation_split(experiment.seed_everything, len(dataset.train), data.val_size)
    return Splits(
        train=dataset.train.take(train[: data.train_size]),
        validation=dataset.train.take(validation[: _limit(experiment, "val", len(validation))]),
        test=dataset.test.take(np.arange(_limit(experiment, stage, min(data.test_size or tests, tests)))),
    )


def _limit(experiment: Experiment, stage: Literal["val", "test", "predict"], samples: int) -> int:
    """Returns how many samples of a split are evaluated: the limits of the Trainer count batches over all ranks."""
    size = experiment.data.evaluation_batch
    return min(samples, size * limited(math.ceil(samples / size), experiment.trainer.limit_of(stage)))


def plan_for(experiment: Experiment, splits: Splits, world_size: int) -> Plan:
    """Returns the plan of a job; see `make_plan`."""
    return make_plan(experiment, world_size, len(splits.train))
