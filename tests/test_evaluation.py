"""Evaluation and prediction on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, SubsetRandomSampler
from torchmetrics import MeanMetric, MeanSquaredError, Metric, PearsonCorrCoef, R2Score, SumMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassAveragePrecision,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
)
from torchmetrics.regression import SpearmanCorrCoef
from torchmetrics.retrieval import RetrievalMAP

from lit_mnist.datamodule import MNISTDataModule
from lit_mnist.errors import InputError
from lit_mnist.mnist import load, normalize
from lit_mnist.module import LitClassifier
from lit_mnist.plugins.evaluation import ExactDDPStrategy, ExactEvaluation, PredictionWriter
from lit_mnist.plugins.sampler import ExactDistributedSampler

warnings.filterwarnings("ignore")

Ranks = Callable[..., list[Any]]


def trainer_of(devices: int, *callbacks: Any, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=ExactDDPStrategy(),
        callbacks=list(callbacks),
        **{"use_distributed_sampler": False, "max_epochs": 1, **options},
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


# --- exact counts


def evaluate_mnist(devices: int) -> tuple[torch.Tensor, dict[str, float], list[str]]:
    exact = ExactEvaluation()
    trainer, module = trainer_of(devices, exact), LitClassifier(seed=1)
    metrics = trainer.test(module, datamodule=MNISTDataModule(seed=1), verbose=False)[0]
    return module.confusion.compute(), metrics, exact.reasons


@pytest.fixture(scope="module")
def mnist() -> tuple[torch.Tensor, float]:
    """The confusion matrix and the loss of the whole test set, without a loader, a Trainer or a metric."""
    net, test = LitClassifier(seed=1).net.eval(), load().test
    with torch.inference_mode():
        logits = torch.cat([net(normalize(batch.unsqueeze(1).float())) for batch in test.images.split(1000)])
    confusion = torch.bincount(test.labels * 10 + logits.argmax(1), minlength=100).view(10, 10)
    return confusion, F.cross_entropy(logits, test.labels).item()


@pytest.mark.parametrize("devices", [1, 2, pytest.param(3, marks=pytest.mark.nightly), 7])
def test_mnist_is_counted_exactly(ranks: Ranks, devices: int, mnist: tuple[torch.Tensor, float]) -> None:
    confusion, loss = mnist
    for found, metrics, reasons in ranks(devices, evaluate_mnist, devices):
        assert torch.equal(found, confusion)
        assert metrics["test_accuracy"] == pytest.approx(confusion.diag().sum().item() / 10_000, abs=1e-7)
        assert metrics["test_loss"] == pytest.approx(loss, rel=1e-6)
        assert not reasons


class Rows(Dataset[dict[str, torch.Tensor]]):
    """A user's data set, which accepts Python integers alone."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(count)
        self.logits = torch.randn(count, 4, generator=generator)
        self.values = torch.randn(count, generator=generator)
        self.labels = {str(row): row % 4 for row in range(count)}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"row": row, "logits": self.logits[row], "value": self.values[row], "label": self.labels[f"{row}"]}


class OddLoader(DataLoader[Any]):
    """A loader that Lightning cannot construct again."""

    def __init__(self, rows: Rows, size: int, /) -> None:
        super().__init__(rows, size, num_workers=1, persistent_workers=True, multiprocessing_context="fork")


LOADERS: dict[str, Callable[[Rows], DataLoader[Any]]] = {
    "plain": lambda rows: DataLoader(rows, 4),
    "shuffled": lambda rows: DataLoader(rows, 4, shuffle=True, drop_last=True),
    "one by one": lambda rows: DataLoader(rows, 1),
    "padded": lambda rows: DataLoader(rows, 4, sampler=DistributedSampler(rows)),
    "exact": lambda rows: DataLoader(rows, batch_sampler=ExactDistributedSampler(rows, 4, evaluation=True)),
    "odd": lambda rows: OddLoader(rows, 4),
}


class Seen(LightningModule):
    """Notes the rows that it has seen; with batch norm that is not synchronized."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.rows: list[int] = []
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch["logits"]), batch["label"])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.rows += batch["row"].tolist()
        self.mean.update(self.net(batch["logits"]).mean(), weight=len(batch["row"]))
        self.log("mean", self.mean)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> None:
        self.rows += batch["row"].tolist()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


# The stage, the loader, and whether Lightning splits the loader first.
SPLITS = [
    ("fit", "shuffled", False),
    ("fit", "one by one", False),
    ("fit", "exact", False),
    ("fit", "odd", False),
    ("validate", "plain", True),
    ("validate", "padded", False),
    ("test", "plain", False),
    ("test", "shuffled", True),
    ("predict", "plain", True),
    ("predict", "plain", False),
    ("predict", "padded", False),
    ("predict", "exact", False),
]


def see_rows(devices: int, count: int) -> list[tuple[list[int], float]]:
    """Returns the rows that this rank has seen, and the mean that it has logged."""
    seen, rows = [], Rows(count)
    for stage, name, split in SPLITS:
        trainer, module, loader = trainer_of(devices, use_distributed_sampler=split), Seen(), LOADERS[name](rows)
        if stage == "fit":
            trainer.fit(module, DataLoader(Rows(16), 4), loader)
        else:
            getattr(trainer, stage)(module, loader)
        seen.append((module.rows, float(trainer.callback_metrics.get("mean", 0.0))))
    return seen


def test_each_loader_gives_each_sample_once(ranks: Ranks) -> None:
    for case, *seen in zip(SPLITS, *ranks(3, see_rows, 3, 10), strict=True):
        assert sorted(row for rows, _ in seen for row in rows) == list(range(10)), case
        # Batch norm is not synchronized: DDP sends the statistics of rank 0 before the first batch.
        assert len({mean for _, mean in seen}) == 1, case


def train_rows(devices: int) -> list[list[int]]:
    """Returns the rows of each epoch that this rank trains on, with a plain loader."""
    epochs: list[list[int]] = []

    class Train(Seen):
        def on_train_epoch_start(self) -> None:
            epochs.append([])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            epochs[-1].extend(batch["row"].tolist())
            return super().training_step(batch, batch_idx)

    trainer_of(devices, max_epochs=2).fit(Train(), DataLoader(Rows(16), 4, shuffle=True))
    return epochs


def test_a_plain_loader_is_split_in_training(ranks: Ranks) -> None:
    first, second = zip(*ranks(2, train_rows, 2), strict=True)
    for ranks_of_epoch in (first, second):
        assert sorted(row for rows in ranks_of_epoch for row in rows) == list(range(16))
    assert first != second


# --- ten classes of torchmetrics


class Scores(LightningModule):
    """Metrics with all kinds of states: sums, matrices, lists, moments that are merged, and lists per batch."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        metrics: dict[str, Metric] = {
            "accuracy": MulticlassAccuracy(4, average="micro"),
            "f1": MulticlassF1Score(4),
            "auroc": MulticlassAUROC(4),
            "binned_auroc": MulticlassAUROC(4, thresholds=7),
            "precision": MulticlassAveragePrecision(4),
            "confusion": MulticlassConfusionMatrix(4),
            "loss": MeanMetric(),
            "count": SumMetric(),
            "mse": MeanSquaredError(),
            "r2": R2Score(),
            "pearson": PearsonCorrCoef(),
            "spearman": SpearmanCorrCoef(),
            "retrieval": RetrievalMAP(),
        }
        self.scores = torch.nn.ModuleDict({name: metrics[name] for name in names or metrics})

    def test_step(self, batch: Any, batch_idx: int = 0) -> None:
        logits, label, value = batch["logits"], batch["label"], batch["value"]
        for name, metric in self.scores.items():
            if name == "loss":
                metric.update(F.cross_entropy(logits, label), weight=len(label))
            elif name == "count":
                metric.update(len(label))
            elif name in ("mse", "r2", "pearson", "spearman"):
                metric.update(logits[:, 0] + value, value)
            elif name == "retrieval":
                metric.update(value, label > 1, indexes=batch["row"] // 3)
            else:
                metric.update(logits, label)

    def on_test_epoch_end(self) -> None:
        self.values = {name: metric.compute() for name, metric in self.scores.items()}


def score(devices: int, count: int, batch_size: int, *names: str) -> Any:
    module = Scores(*names)
    try:
        trainer_of(devices).test(module, DataLoader(Rows(count), batch_size), verbose=False)
    except InputError as error:
        return str(error)
    return module.values


@pytest.mark.parametrize(
    ("devices", "count", "batch_size"), [(1, 101, 8), (2, 101, 8), (3, 101, 8), (2, 17, 8), (3, 4, 2), (2, 6, 1)]
)
def test_metrics_do_not_depend_on_the_ranks(ranks: Ranks, devices: int, count: int, batch_size: int) -> None:
    expected = Scores()
    expected.test_step(next(iter(DataLoader(Rows(count), count))))
    expected.on_test_epoch_end()
    for values in ranks(devices, score, devices, count, batch_size):
        for name, value in expected.values.items():
            torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


@pytest.mark.parametrize(
    ("devices", "count", "batch_size", "names", "message"),
    [(3, 2, 4, (), "2 samples cannot be evaluated on 3 ranks"), (2, 5, 1, ("count", "retrieval"), "RetrievalMAP")],
)
def test_what_cannot_be_exact_is_rejected(
    ranks: Ranks, devices: int, count: int, batch_size: int, names: tuple[str, ...], message: str
) -> None:
    for error in ranks(devices, score, devices, count, batch_size, *names):
        assert message in error


# --- what is not exact is said


class Logs(Seen):
    def __init__(self, log: Callable[[Logs, float, int], None]) -> None:
        super().__init__()
        self.log_step = log

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        self.log_step(self, float(batch["value"].mean()), len(batch["value"]))

    def on_test_epoch_end(self) -> None:
        self.log("same_on_all_ranks", self.mean.compute())


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        rows = Rows(8)
        return iter([rows[row] for row in range(8)])


def as_number(module: Logs, value: float, size: int) -> None:
    module.log("number", value)


def as_synced_number(module: Logs, value: float, size: int) -> None:
    module.log("number", value, sync_dist=True, batch_size=size)


def as_sum(module: Logs, value: float, size: int) -> None:
    module.log("size", float(size), sync_dist=True, reduce_fx="sum")


def nothing(module: Logs, value: float, size: int) -> None:
    pass


class OfEachRank(Logs):
    def on_test_epoch_end(self) -> None:
        self.log("number", float(self.rows[0]), sync_dist=True)


INEXACT: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
    (Logs, nothing, LOADERS["plain"], {}, ""),
    (Logs, as_sum, LOADERS["plain"], {}, ""),
    (Logs, as_number, LOADERS["plain"], {}, "number"),
    (Logs, as_synced_number, LOADERS["plain"], {}, "number"),
    (OfEachRank, nothing, LOADERS["plain"], {}, "number"),
    (Logs, nothing, lambda rows: DataLoader(Stream(), 4), {}, "DataLoader"),
    (Logs, nothing, lambda rows: DataLoader(rows, 4, sampler=SubsetRandomSampler(range(6))), {}, "DataLoader"),
    (Logs, nothing, LOADERS["plain"], {"limit_test_batches": 1}, "limit_test_batches"),
]


def find_reasons(devices: int) -> list[list[str]]:
    found = []
    for kind, log, loader, options, _ in INEXACT:
        exact = ExactEvaluation()
        trainer_of(devices, exact, **options).test(kind(log), loader(Rows(9)), verbose=False)
        found.append(exact.reasons)
    return found


def test_what_is_not_exact_is_said(ranks: Ranks) -> None:
    for reasons in ranks(2, find_reasons, 2):
        for (*_, word), found in zip(INEXACT, reasons, strict=True):
            assert len(found) == bool(word), found
            assert all(word in reason for reason in found)


# --- predictions once each, in order


class Predicts(LightningModule):
    def __init__(self, form: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.form(batch["row"], batch["logits"])


FORMS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda row, logits: logits,
    lambda row, logits: (row, logits),
    lambda row, logits: {"row": row, "both": [logits, 2 * logits]},
]
PREDICTED = [("plain", True), ("shuffled", False), ("padded", False), ("exact", False)]


def predict(devices: int, count: int, folder: str) -> Any:
    rows = Rows(count)
    for number, form in enumerate(FORMS):
        for name, split in PREDICTED if number == 0 else PREDICTED[:1]:
            writer = PredictionWriter(f"{folder}/{number}-{name}")
            loader = LOADERS[name](rows)
            trainer_of(devices, writer, use_distributed_sampler=split).predict(Predicts(form), loader)
    writer = PredictionWriter(f"{folder}/two")
    trainer_of(devices, writer).predict(Predicts(FORMS[0]), [LOADERS["plain"](rows), LOADERS["plain"](Rows(5))])
    with pytest.raises(InputError):
        trainer_of(devices, writer).predict(Predicts(lambda row, logits: logits.mean()), LOADERS["plain"](rows))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_predictions_are_gathered_in_order(ranks: Ranks, devices: int, tmp_path: Any) -> None:
    ranks(devices, predict, devices, 10, str(tmp_path))
    logits = Rows(10).logits
    for name, _ in PREDICTED:
        assert torch.equal(torch.load(tmp_path / f"0-{name}" / "predictions.pt"), logits), name
    row, found = torch.load(tmp_path / "1-plain" / "predictions.pt")
    assert torch.equal(found, logits)
    assert torch.equal(row, torch.arange(10))
    found = torch.load(tmp_path / "2-plain" / "predictions.pt")
    assert torch.equal(found["row"], torch.arange(10))
    assert torch.equal(found["both"][1], 2 * logits)
    first, second = torch.load(tmp_path / "two" / "predictions.pt")
    assert torch.equal(first, logits)
    assert torch.equal(second, Rows(5).logits)
