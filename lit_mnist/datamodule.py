"""The LightningDataModule: verified pictures, cut into batches by the project's own order."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn

from lit_mnist.data.dataset import AnySplit, Scenes, dataset_of
from lit_mnist.data.loader import Batch, EvaluationBatches, TrainBatches
from lit_mnist.experiment import DataSettings, Experiment
from lit_mnist.job import Splits, plan_for, split_dataset
from lit_mnist.plan import Plan
from lit_mnist.training.precision import weight_dtype


class MNISTDataModule(LightningDataModule):
    """Batches of MNIST or one of its family, or of scenes.

    Its loaders know their rank: the Trainer must leave them alone (`use_distributed_sampler=False`), and ask for a new
    one at each epoch (`reload_dataloaders_every_n_epochs=1`).

    Args:
        seed: Seed of the split, the order and the augmentation.
        **kwargs: The settings of `DataSettings`.
    """

    def __init__(self, seed: int = 42, **kwargs: Any) -> None:
        super().__init__()
        self.settings = DataSettings(**kwargs)
        self.experiment = Experiment(seed_everything=seed, data=self.settings)
        self._splits: Splits | None = None
        self._plan: Plan | None = None

    @classmethod
    def of(cls, experiment: Experiment, splits: Splits, plan: Plan) -> MNISTDataModule:
        """Returns a data module with data that are loaded already."""
        module = cls()
        module.settings, module.experiment = experiment.data, experiment
        module._splits, module._plan = splits, plan
        return module

    @property
    def splits(self) -> Splits:
        """The samples, loaded at the first need."""
        if self._splits is None:
            self._splits = split_dataset(self.experiment, dataset_of(self.settings))
        return self._splits

    @property
    def plan(self) -> Plan:
        """Batches and steps of the run."""
        if self._plan is None:
            trainer = self.trainer
            experiment = self.experiment
            if trainer is not None:
                experiment = experiment.replace(
                    "trainer",
                    max_epochs=trainer.max_epochs,
                    max_steps=trainer.max_steps,
                    accumulate_grad_batches=trainer.accumulate_grad_batches,
                )
            self._plan = plan_for(experiment, self.splits, trainer.world_size if trainer else 1)
        return self._plan

    @property
    def _dtype(self) -> torch.dtype:
        precision = self.trainer.precision if self.trainer else "32-true"
        return weight_dtype("64-true" if precision == "64-true" else "32-true")

    def train_dataloader(self) -> TrainBatches:
        """Returns the micro-batches of the current epoch, from where the run stands."""
        assert self.trainer is not None
        _, first = self.plan.position(self.trainer.global_step)
        return TrainBatches(
            self.splits.train,
            plan=self.plan,
            settings=self.settings,
            seed=self.experiment.seed_everything,
            epoch=self.trainer.current_epoch,
            rank=self.trainer.global_rank,
            first=first,
            dtype=self._dtype,
            device=self.trainer.strategy.root_device,
        )

    def val_dataloader(self) -> EvaluationBatches:
        """Returns this rank's part of the validation split."""
        return self._evaluation(self.splits.validation)

    def test_dataloader(self) -> EvaluationBatches:
        """Returns this rank's part of the test split."""
        return self._evaluation(self.splits.test)

    def predict_dataloader(self) -> EvaluationBatches:
        """Returns this rank's part of the test split."""
        split = self.splits.test
        # See Job.evaluation_batches.
        return self._evaluation(split, batch_size=1 if isinstance(split, Scenes) else None)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Moves a batch as the other engines do, without a search for tensors in all that it holds."""
        moved = batch.to(device)
        fits = self.trainer is not None and self.trainer.state.fn == TrainerFn.FITTING
        # On GPUs DDP would move the samples' numbers, too, and wait for that; only a test asks for them.
        return moved._replace(indices=moved.targets[:0]) if fits and device.type == "cuda" else moved

    def _evaluation(self, split: AnySplit, batch_size: int | None = None) -> EvaluationBatches:
        assert self.trainer is not None
        return EvaluationBatches(
            split,
            rank=self.trainer.global_rank,
            world_size=self.trainer.world_size,
            batch_size=batch_size or self.settings.evaluated_at_once,
            settings=self.settings,
            dtype=self._dtype,
            device=self.trainer.strategy.root_device,
        )
