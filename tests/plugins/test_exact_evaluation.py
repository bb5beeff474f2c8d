"""LitTrainer evaluates a user's module on several ranks as on one, to the sample, and says where it cannot."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from ranks import results_of_ranks
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score
from torchmetrics.retrieval import RetrievalMRR

from lit_mnist.distributed.rank import Rank
from lit_mnist.trainer import LitTrainer

COUNTS = (1, 2, 11, 37)


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 4, generator=generator), torch.randint(0, 3, (count,), generator=generator))


class Usual(LightningModule):
    """What a user may have written: means per batch, torchmetrics objects of several kinds, and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.auroc = MulticlassAUROC(3)
        self.mrr = RetrievalMRR(empty_target_action="skip")
        self.several = MetricCollection({"f1": MulticlassF1Score(3), "top2": MulticlassAccuracy(3, top_k=2)})
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        logits, targets = self.net(batch[0]), batch[1]
        self.seen.append(len(targets))
        self.accuracy(logits, targets)
        self.auroc.update(logits.softmax(1), targets)
        self.mrr.update(logits[:, 0], targets > 0, (batch[0][:, 1] > 0).long())
        self.several.update(logits, targets)
        loss = F.cross_entropy(logits, targets)
        self.log("loss", loss, sync_dist=True)
        self.log("both", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("largest", logits.max(), reduce_fx="max", sync_dist=True)
        self.log("count", float(len(targets)), reduce_fx="sum", sync_dist=True)
        self.log("accuracy", self.accuracy)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.several.compute())
        self.several.reset()
        self.log("mrr", self.mrr.compute())
        self.mrr.reset()
        self.log("auroc", self.auroc.compute(), sync_dist=True)
        self.auroc.reset()

    on_test_epoch_end = on_validation_epoch_end

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer_of(rank: Rank, folder: Path, **options: Any) -> LitTrainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return LitTrainer(
        accelerator="cpu",
        devices=rank.world_size,
        precision="32-true",
        default_root_dir=folder,
        **{"enable_checkpointing": False, **quiet, **options},
    )


def evaluated(rank: Rank, folder: Path) -> list[dict[str, Any]]:
    seed_everything(1, verbose=False)
    found = []
    for count in COUNTS:
        trainer, module = trainer_of(rank, folder), Usual()
        metrics = trainer.test(module, DataLoader(samples(count), 4), verbose=False)[0]
        found.append({"metrics": metrics, "inexact": trainer.inexact_evaluation, "seen": sum(module.seen)})
    # Several loaders, one of which leaves ranks without a sample; twice with one Trainer; and in a fit.
    trainer, module = trainer_of(rank, folder, max_epochs=2, sync_batchnorm=True), Usual()
    loaders = [DataLoader(samples(count), 4) for count in (1, 11, 2)]
    for _ in range(2):
        each = trainer.validate(module, loaders, verbose=False)
        found.append({"metrics": {k: v for metrics in each for k, v in metrics.items()}, "seen": sum(module.seen)})
    fit = trainer_of(rank, folder, max_epochs=2)
    module = Usual()
    fit.fit(module, DataLoader(samples(36), 36 // rank.world_size), DataLoader(samples(1), 4))
    found.append({"metrics": {k: float(v) for k, v in fit.callback_metrics.items()}, "seen": sum(module.seen)})
    return found


def test_an_evaluation_is_exact_to_the_sample(tmp_path: Path) -> None:
    """Also on ranks with a batch less, and without a sample."""
    found = {n: results_of_ranks(lambda rank: evaluated(rank, tmp_path), tmp_path / str(n), n) for n in (1, 2, 3)}
    for ranks in found.values():
        for number, reference in enumerate(found[1][0]):
            assert sum(rank[number]["seen"] for rank in ranks) == reference["seen"]
            for rank in ranks:
                assert rank[number].get("inexact", []) == []
                for name, value in reference["metrics"].items():
                    # The value of a step is that of one batch of rank 0.
                    if not name.startswith("both_step"):
                        assert rank[number]["metrics"][name] == pytest.approx(value, rel=1e-5, nan_ok=True), name
