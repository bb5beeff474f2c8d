"""LitTrainer evaluates a user's module on several ranks as on one, to the sample, and says where it cannot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter
from ranks import results_of_ranks
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.aggregation import RunningMean
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


class Numbers(IterableDataset):
    def __iter__(self) -> Any:
        return iter(torch.arange(6.0))


class Batches:
    """No loader of torch."""

    def __iter__(self) -> Any:
        return iter([torch.ones(2), torch.zeros(2)])

    def __len__(self) -> int:
        return 2


class OfPosition(DataLoader):
    """A loader whose constructor has arguments of its own, which Lightning cannot find again."""

    def __init__(self, data: Any, size: int, collate: Any) -> None:
        super().__init__(data, size, collate_fn=collate)


def collated(rows: list[Any]) -> dict[str, Any]:
    return {"x": torch.stack([row[0] for row in rows]), "y": torch.stack([row[1] for row in rows])}


class Logs(LightningModule):
    """Logs what is asked for."""

    def __init__(self, loader: Any, **options: Any) -> None:
        super().__init__()
        self.loader, self.options = loader, {"sync_dist": True, **options}
        self.running = MeanMetric()
        self.at_end = self.options.pop("at_end", False)
        self.random = self.options.pop("random", False)
        self.ones: list[torch.Tensor] = []
        if self.random:
            self.metric = RunningMean()

    def val_dataloader(self) -> Any:
        return self.loader() if callable(self.loader) else self.loader

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        values = batch if isinstance(batch, torch.Tensor) else batch["x"] if isinstance(batch, dict) else batch[0]
        self.ones.append(values.float().mean())
        if self.random:
            self.metric.update(values)
            self.log("running", self.metric)
        elif not self.at_end:
            self.log("mean", values.float().mean(), **self.options)

    def on_validation_epoch_end(self) -> None:
        if self.at_end:
            self.log("mean", torch.stack([torch.zeros(()), *self.ones]).mean(), **self.options)

    def predict_step(self, batch: Any, batch_idx: int) -> list[float]:
        return batch["x"][:, 0].tolist()


DATA = samples(11)
# The loader or a function that returns it, how the value is logged, options of the Trainer, and the reason.
INEXACT: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "a sampler": (DataLoader(DATA, 4, sampler=DistributedSampler(DATA, 2, 0)), {}, {}, "DistributedSampler .* remove"),
    "shuffle": (DataLoader(DATA, 4, shuffle=True), {}, {}, "set shuffle=False"),
    "drop_last": (DataLoader(DATA, 2, drop_last=True), {}, {}, "set drop_last=False"),
    "iterable": (DataLoader(Numbers(), 2), {}, {}, "use a map-style data set"),
    "no loader": (Batches(), {}, {}, "a Batches is evaluated as it is on each rank"),
    "limit": (DataLoader(DATA, 2), {}, {"limit_val_batches": 2}, "limit_val_batches counts the batches of each rank"),
    "no sync_dist": (DataLoader(DATA, 4), {"sync_dist": False}, {}, "mean is logged without sync_dist=True"),
    "a batch size": (
        DataLoader(
            TensorDataset(torch.ones(11, 3)), 4, collate_fn=lambda rows: torch.stack([row[0] for row in rows]).T
        ),
        {},
        {},
        "their sum is .*, but there are 11 samples. Pass batch_size",
    ),
    "at the end": (DataLoader(DATA, 4), {"at_end": True}, {}, "on_validation_epoch_end, as the mean of what each rank"),
    "a window": (DataLoader(DATA, 4), {"random": True}, {}, "RunningMean keeps the last batches"),
    "unsplit": (DataLoader(DATA, 4), {}, {"use_distributed_sampler": False}, "each rank evaluate all samples"),
    "off": (DataLoader(DATA, 4), {}, {"exact_evaluation": False}, "exact_evaluation is False"),
}


def test_what_is_not_exact_is_stated(tmp_path: Path) -> None:
    def work(rank: Rank) -> Any:
        found = {}
        for name, (loader, options, more, _) in INEXACT.items():
            trainer = trainer_of(rank, tmp_path, **more)
            trainer.validate(Logs(loader, **options), verbose=False)
            found[name] = trainer.inexact_evaluation
        return found

    alone, *ranks = *results_of_ranks(work, tmp_path / "1", 1), *results_of_ranks(work, tmp_path / "2", 2)
    assert alone == {name: [] for name in INEXACT}
    for name, (_, _, _, reason) in INEXACT.items():
        assert len(ranks[0][name]) == 1, name
        assert re.search(reason, ranks[0][name][0]), name


class Indices(BasePredictionWriter):
    """Keeps which samples a rank has predicted."""

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.found = batch_indices[0]


LOADERS: dict[str, Any] = {
    "made by the hook": lambda: DataLoader(DATA, 4, collate_fn=collated),
    "made before": DataLoader(DATA, 4, collate_fn=collated),
    "a subclass": OfPosition(DATA, 4, collated),
    "a subclass, made by the hook": lambda: OfPosition(DATA, 4, collated),
    "without the last batch": DataLoader(DATA, 4, False, None, None, 0, collated, False, True),
}


def predicted(rank: Rank, folder: Path) -> Any:
    found = {}
    for name, loader in LOADERS.items():
        indices = Indices("epoch")
        module, trainer = Logs(loader), trainer_of(rank, folder, callbacks=[indices])
        module.predict_dataloader = module.val_dataloader  # type: ignore[method-assign]
        found[name] = [trainer.predict(module), indices.found]
        trainer.validate(module, verbose=False)
        found[name] += [float(trainer.callback_metrics["mean"])] if "last" not in name else []
    return found


def test_a_loader_with_positional_arguments_is_predicted(tmp_path: Path) -> None:
    alone = results_of_ranks(lambda rank: predicted(rank, tmp_path), tmp_path / "1", 1)[0]
    ranks = results_of_ranks(lambda rank: predicted(rank, tmp_path), tmp_path / "2", 2)
    for name in LOADERS:
        values = {
            index: value
            for outputs, indices, *_ in (rank[name] for rank in ranks)
            for batch, of_batch in zip(outputs, indices, strict=True)
            for value, index in zip(batch, of_batch, strict=True)
        }
        assert [values[index] for index in range(11)] == [value for batch in alone[name][0] for value in batch]
        assert all(rank[name][2:] == pytest.approx(alone[name][2:]) for rank in ranks)
