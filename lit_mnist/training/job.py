"""A job of the experiment: what each rank computes, validated and loaded once by the parent process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from lit_mnist.checkpoint.config import flatten
from lit_mnist.checkpoint.lightning_internals import lightning_loops
from lit_mnist.data.dataset import Dataset, Split
from lit_mnist.data.loader import Batch, EvaluationBatches, TrainBatches
from lit_mnist.distributed.precision import weight_dtype
from lit_mnist.distributed.rank import Rank
from lit_mnist.distributed.sample_order import train_indices, validation_split
from lit_mnist.experiment import Experiment
from lit_mnist.experiment.plan import Plan, make_plan
from lit_mnist.experiment.registry import registered_by
from lit_mnist.models.build import build_net
from lit_mnist.run.job import Job
from lit_mnist.run.progress import with_bar
from lit_mnist.run.settings import Command


@dataclass(frozen=True)
class Splits:
    """The samples that an experiment trains, validates and tests on."""

    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True, kw_only=True)
class ExperimentJob(Job):
    """A job of the experiment, for all engines.

    Attributes:
        experiment: The configured experiment.
        dataset: The data set, loaded and verified.
        splits: The samples to train, validate and test on.
        plan: Batches and steps.
        weights: Initial weights, keyed by parameter name, which replace the random ones.
        files: The user's images to predict instead of the test set; `splits.test` contains them.
        options: Creates the further options of Lightning's Trainer.
        cuda_graph: Whether the steps run as CUDA graphs.
    """

    experiment: Experiment
    dataset: Dataset
    splits: Splits
    plan: Plan
    weights: Mapping[str, torch.Tensor] | None = None
    files: tuple[Path, ...] = ()
    options: Callable[[], dict[str, Any]] | None = None
    cuda_graph: bool = False

    @property
    def samples_per_step(self) -> int:
        """Samples of an optimizer step over all ranks."""
        return self.plan.batch_size * self.plan.accumulate

    @property
    def lr(self) -> float:
        """The learning rate; of a schedule, its peak."""
        return self.plan.lr

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.plan.total_steps

    def describe(self) -> dict[str, Any]:
        """Returns what `result.json` says of the network and the data."""
        data = {"name": self.dataset.name, "source": self.dataset.source, "sha256": self.dataset.sha256}
        chosen = registered_by(dict(flatten(self.config)))
        registered = {each.key: each.to_dict() for each in chosen}
        return {"model": None, "data": data, "registered": registered, "cuda_graph": self.cuda_graph}

    def can_continue(self, steps: int) -> bool:
        """Returns whether a training run that has ended after some optimizer steps can be resumed with more epochs."""
        model = self.experiment.model
        return model.schedule == "constant" and not model.warmup and steps == self.plan.total_steps

    def samples_of(self, step: int, ranks: Sequence[int]) -> list[int]:
        """Returns the indices of the training samples of an optimizer step on some ranks."""
        plan = self.plan
        epoch, first = plan.position(step - 1)
        share = plan.batch_size // plan.world_size
        numbers: list[int] = []
        for batch in range(first, first + plan.accumulation_window(first)):
            whole = train_indices(
                self.seed, plan.order_of(epoch), batch, count=len(self.splits.train), batch_size=plan.batch_size
            )
            for rank in ranks:
                numbers += whole[rank * share : (rank + 1) * share].tolist()
        return numbers

    def note_partial(self, metrics: Mapping[str, Any] | None, stage: str) -> Mapping[str, Any] | None:
        """Returns the metrics of a stage (`val` or `test`), which say so if a limit has excluded a part of the data."""
        if metrics is None:
            return None
        data, tests = self.experiment.data, len(self.dataset.test)
        samples = min(data.test_size or tests, tests) if stage == "test" else data.val_size
        return {**metrics, **({"partial": True} if metrics["count"] < samples else {})}

    def section(self) -> dict[str, Any]:
        """Returns what a checkpoint says of the run, as plain values."""
        return {
            **super().section(),
            "config": self.experiment.replace("run", dir=None, resume=None, inject=None).to_dict(),
            "data_sha256": self.dataset.sha256,
            "num_classes": self.dataset.num_classes,
            "batch_size": self.plan.batch_size,
            "total_steps": self.plan.total_steps,
        }

    def position(self, step: int) -> dict[str, Any]:
        """Returns the epoch and the state of Lightning's loops after an optimizer step, for a checkpoint."""
        epoch, batch = self.plan.position(step)
        loops = lightning_loops(
            step,
            epoch=epoch,
            batch=batch,
            batches_per_epoch=self.plan.batches_per_epoch,
            steps_per_epoch=self.plan.steps_per_epoch,
        )
        return {"epoch": epoch, "loops": loops}

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

    def evaluation_batches(self, split: Split, rank: Rank) -> Iterable[Batch]:
        """Returns the batches of a split that a rank evaluates; rank 0 shows a bar, unless a training run shows one."""
        data = self.experiment.data
        batches = EvaluationBatches(
            split,
            rank=rank.rank,
            world_size=rank.world_size,
            batch_size=data.evaluation_batch,
            settings=data,
            dtype=weight_dtype(self.precision),
            device=self.devices.of(rank),
        )
        in_training = self.trains and split is self.splits.validation
        shown = rank.is_first and self.experiment.trainer.enable_progress_bar and not in_training
        return with_bar(batches, len(batches)) if shown else batches


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
    # As in Lightning, a limit of 0 turns the validation of a training run off.
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
