"""Evaluation and prediction that do not depend on the number of ranks, and that say where they do."""

import copy
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info, rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler
from torchmetrics import Metric

from lit_mnist.errors import InputError
from lit_mnist.plugins.lightning_internals import logged_values_without_metric
from lit_mnist.plugins.sampler import ExactDistributedSampler
from lit_mnist.plugins.sync_batch_norm import BatchNormOverRanks


class ExactDDPStrategy(DDPStrategy):
    """DDP in which an evaluation uses each sample exactly once, on any number of ranks.

    Without it, the samples of an evaluation are padded with some that are counted twice, so that its result depends on
    the number of ranks. Log torchmetrics objects:

        trainer = Trainer(devices=4, strategy=ExactDDPStrategy(), use_distributed_sampler=False)
        trainer.test(module, DataLoader(dataset, batch_size=256))

    It splits each loader of a map-style data set that has torch's own samplers, whatever `use_distributed_sampler` is:
    in an evaluation by ExactDistributedSampler, where `shuffle` and `drop_last` have no effect, and in training by
    DistributedSampler. It does not change other loaders; `ExactEvaluation` names them.

    Args:
        split: Whether to split loaders; set it to False if each rank has a data set of its own.
        **kwargs: The arguments of DDPStrategy.

    Raises:
        InputError: There are fewer samples than ranks; or, with batches of one sample, a rank has a batch less than
            another, and a metric gathers its lists batch by batch, which would hang.
    """

    def __init__(self, *, split: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.split = split

    def configure_ddp(self) -> None:
        """Wraps the module; DDP does not send buffers in each forward pass if only synchronized batch norm has some."""
        super().configure_ddp()
        assert self.lightning_module
        assert isinstance(self.model, DistributedDataParallel)
        kept_equal = (BatchNormOverRanks, nn.SyncBatchNorm)
        others = (layer for layer in self.lightning_module.modules() if not isinstance(layer, kept_equal))
        self.model.broadcast_buffers &= any(True for layer in others for _ in layer.buffers(recurse=False))

    def process_dataloader(self, dataloader: object) -> object:
        """Returns a loader of this rank's part of the samples."""
        assert self.lightning_module
        trainer = self.lightning_module.trainer
        if self.world_size == 1 or not self.split or not isinstance(dataloader, DataLoader):
            return dataloader
        batches: Any = dataloader.batch_sampler
        sampler = getattr(batches, "sampler", None)
        # In a prediction, Lightning wraps each batch sampler to record the indices.
        is_plain = type(batches) is BatchSampler or trainer.predicting
        if is_plain and type(sampler) in (SequentialSampler, RandomSampler, DistributedSampler):
            dataloader = self._split(dataloader, batches, sampler)
        if isinstance(dataloader.batch_sampler, ExactDistributedSampler) and not trainer.training:
            self._check_lists(dataloader.batch_sampler)
        return dataloader

    def _split(self, loader: DataLoader[Any], batches: Any, sampler: Any) -> DataLoader[Any]:
        assert self.lightning_module
        trainer, dataset = self.lightning_module.trainer, loader.dataset
        if not trainer.training:
            exact = ExactDistributedSampler(dataset, batches.batch_size, evaluation=True)  # type: ignore[arg-type]
            batches = type(batches)(exact) if trainer.predicting else exact
        elif not isinstance(sampler, DistributedSampler):
            seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))  # as Lightning does
            sampler = DistributedSampler[Any](dataset, shuffle=isinstance(sampler, RandomSampler), seed=seed)
            batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
        # The constructor of a subclass may have any arguments, so the loader is copied instead of constructed again.
        copied = copy.copy(loader)
        vars(copied)["batch_sampler"] = batches
        return copied

    def _check_lists(self, batches: ExactDistributedSampler) -> None:
        assert self.lightning_module
        if len(batches.dataset) // batches.world_size >= len(batches):
            return
        for metric in self.lightning_module.modules():
            if isinstance(metric, Metric) and any(isinstance(state, list) for state in metric.metric_state.values()):
                raise InputError(
                    f"{type(metric).__name__} keeps a list of batches, and {len(batches.dataset)} batches of one "
                    f"sample cannot be split evenly over {batches.world_size} ranks. Use a batch size of at least 2."
                )


class ExactEvaluation(Callback):
    """Says once why an evaluation depends on the number of ranks.

    Without it, a value such as `self.log("val_loss", loss)` is that of rank 0, or a wrong mean with `sync_dist=True`,
    and nothing says so:

        exact = ExactEvaluation()
        trainer = Trainer(devices=4, strategy=ExactDDPStrategy(), callbacks=[exact])
        trainer.test(module)
        assert not exact.reasons

    It cannot see a MeanMetric without `weight=len(batch)`, nor a metric whose value depends on the batches.

    Attributes:
        reasons: What was not exact, and what to change; empty on one rank.
    """

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Examines a validation."""
        self._examine(trainer, "val", trainer.val_dataloaders, trainer.limit_val_batches)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Examines a test."""
        self._examine(trainer, "test", trainer.test_dataloaders, trainer.limit_test_batches)

    def _examine(self, trainer: Trainer, stage: str, loaders: Any, limit: float) -> None:
        if trainer.world_size == 1:
            return
        reasons = []
        for loader in CombinedLoader(loaders, "sequential").flattened:
            batches = getattr(loader, "batch_sampler", None)
            if not (isinstance(batches, ExactDistributedSampler) and batches.evaluation):
                reasons.append(
                    f"A {type(loader).__name__} of {stage} is split by a sampler or data set that may repeat or omit "
                    "samples. Use ExactDDPStrategy and a DataLoader of a map-style data set without a sampler, or with "
                    "ExactDistributedSampler(..., evaluation=True)."
                )
        if not isinstance(limit, float) or limit < 1:
            reasons.append(f"limit_{stage}_batches counts the batches of each rank. Remove it.")
        mine = logged_values_without_metric(trainer)
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, mine)
        differs = {name for name, value in mine.items() if any(rank.get(name) != value for rank in everyone)}
        if names := [name for name, value in mine.items() if value is None or name in differs]:
            reasons.append(
                f"{', '.join(names)}: a number that is logged is not averaged correctly over the ranks. Log a "
                "torchmetrics object instead, such as a MeanMetric that is updated with weight=len(batch)."
            )
        for reason in reasons:
            if reason not in self.reasons:
                self.reasons.append(reason)
                rank_zero_warn(reason)


class PredictionWriter(BasePredictionWriter):
    """Writes the predictions of all ranks to one file, once each and in the order of the data set.

    Without it, each rank has the predictions of its own samples:

        trainer = Trainer(devices=4, strategy=ExactDDPStrategy(), callbacks=[PredictionWriter("runs/mine")])
        trainer.predict(module, loader, return_predictions=False)
        predictions = torch.load("runs/mine/predictions.pt")

    The file has what `predict_step` returns, tensors or tuples, lists or dicts of tensors, concatenated along the first
    dimension; with several loaders, a list of that.

    Args:
        folder: The folder of `predictions.pt`; by default the `default_root_dir` of the Trainer.

    Raises:
        InputError: The predictions are not tensors whose first dimension counts the samples, or the data set is not
            map-style.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(write_interval="epoch")
        self.folder = folder

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], batch_indices: Sequence[Any]
    ) -> None:
        """Writes the file on rank 0."""
        loaders = [predictions] if len(batch_indices) == 1 else predictions
        gathered = [gather_predictions(*each) for each in zip(loaders, batch_indices, strict=True)]
        if trainer.is_global_zero:
            folder = Path(self.folder or trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(gathered[0] if len(gathered) == 1 else gathered, folder / "predictions.pt")
            rank_zero_info(f"The predictions are in {folder / 'predictions.pt'}.")


def gather_predictions(predictions: Sequence[Any], batch_indices: Sequence[Sequence[int]]) -> Any:
    """Returns on rank 0 the predictions of all ranks in the order of the data set, and on the other ranks None.

    Args:
        predictions: What `predict_step` has returned for each batch of this rank, on the CPU.
        batch_indices: The indices of the samples of each batch.

    Raises:
        InputError: As for PredictionWriter.
    """
    rows = np.array([row for batch in batch_indices for row in batch], np.int64)
    mine = _concatenate(predictions, len(rows))
    everyone: list[Any] = [(rows, mine)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        # torch.save, as dist.gather_object fails for tensors with torch 2.15.
        buffer = io.BytesIO()
        torch.save((torch.from_numpy(rows), mine), buffer)
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(buffer.getvalue(), parts)
        if parts is None:
            return None
        everyone = [torch.load(io.BytesIO(part), weights_only=True) for part in parts]
    rows = np.concatenate([np.asarray(part) for part, _ in everyone])
    _, order = np.unique(rows, return_index=True)
    return _concatenate([part for _, part in everyone], len(rows), torch.from_numpy(order))


def _concatenate(parts: Sequence[Any], count: int, order: Any = slice(None)) -> Any:
    """Concatenates tensors, or those in tuples, lists and dicts, to `count` rows each, and selects rows in an order."""
    first = parts[0] if parts else None
    if isinstance(first, dict):
        return {key: _concatenate([part[key] for part in parts], count, order) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_concatenate(each, count, order) for each in zip(*parts, strict=True))
    if isinstance(first, torch.Tensor) and first.ndim and sum(len(part) for part in parts) == count:
        return torch.cat(list(parts))[order]
    raise InputError(
        "Predictions can be put in order only if predict_step returns tensors whose first dimension counts the samples "
        "of its batch, and if the data set is map-style."
    )
