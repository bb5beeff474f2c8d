"""Metrics of unpadded, uneven ranks are those of one process, exact to the sample; those of a stock Trainer are not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from ranks import results_of_ranks, stock_trainer
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MeanSquaredError, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import InputError
from lit_mnist.plugins import ExactDistributedSampler, exact_metric
from lit_mnist.plugins.evaluation.lightning_internals import set_update_count, state_reductions, update_count

COUNTS = (10, 101, 1001)


def samples(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def correct(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (logits.argmax(1) == targets).double()


class Classifier(LightningModule):
    """Logs its metrics exactly, and as most modules do."""

    def __init__(self, count: int | None) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 3)
        torch.nn.init.normal_(self.net.weight, generator=torch.Generator().manual_seed(0))
        torch.nn.init.zeros_(self.net.bias)
        self.loss = exact_metric(partial(F.cross_entropy, reduction="none"), expected=count)
        self.accuracy = exact_metric(correct)
        self.of_torchmetrics = exact_metric(MulticlassAccuracy(3, average="micro"), expected=count)
        self.auroc = exact_metric(MulticlassAUROC(3))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits, targets = self.net(batch[0]), batch[1]
        for metric in (self.loss, self.accuracy, self.of_torchmetrics, self.auroc):
            metric.update(logits, targets)
        self.log("stock_loss", F.cross_entropy(logits, targets), sync_dist=True, batch_size=len(targets))
        self.log("stock_accuracy", correct(logits, targets).mean(), sync_dist=True, batch_size=len(targets))

    def on_validation_epoch_end(self) -> None:
        for name in ("loss", "accuracy", "of_torchmetrics", "auroc"):
            self.log(name, getattr(self, name).result(partial=self.trainer.sanity_checking))


def evaluated(rank: Rank, folder: Path) -> list[dict[str, float]]:
    """The metrics of each data set: by the sampler, and by the stock Trainer's own."""
    found = []
    for count in COUNTS:
        data = samples(count)
        options: dict[str, Any] = {"strategy": "ddp" if rank.world_size > 1 else "auto"}
        trainer = stock_trainer(rank.world_size, folder, use_distributed_sampler=False, **options)
        loader = DataLoader(data, batch_sampler=ExactDistributedSampler(data, 14, evaluation=True))
        exact: dict[str, float] = {}
        # Twice, since a metric must begin anew; with the logged means of the ranks only where each has a batch.
        module = Classifier(count)
        if count < rank.world_size * 2:
            module.log = partial(_log_exact, module.log)  # type: ignore[method-assign]
        for _ in range(2):
            exact = {name: float(value) for name, value in trainer.validate(module, loader, verbose=False)[0].items()}
        padded = stock_trainer(rank.world_size, folder, **options)
        stock = padded.validate(Classifier(None), DataLoader(data, 7), verbose=False)[0]
        found.append({**exact, **{f"padded_{name}": float(value) for name, value in stock.items()}})
    return found


def _log_exact(log: Any, name: str, *values: Any, **options: Any) -> None:
    if not name.startswith("stock_"):
        log(name, *values, **options)


@pytest.mark.parametrize("world_sizes", [(1, 3), pytest.param((1, 2, 7), marks=pytest.mark.slow)])
def test_a_metric_is_one_number_on_any_number_of_ranks(tmp_path: Path, world_sizes: tuple[int, ...]) -> None:
    found = {}
    for world_size in world_sizes:
        ranks = results_of_ranks(lambda rank: evaluated(rank, tmp_path), tmp_path / str(world_size), world_size)
        assert all(rank == ranks[0] for rank in ranks)
        found[world_size] = ranks[0]
    for number, count in enumerate(COUNTS):
        images, targets = samples(count).tensors
        module = Classifier(None)
        logits = module.net(images).detach()
        whole = found[1][number]
        assert whole["accuracy"] == float(correct(logits, targets).sum()) / count
        assert whole["loss"] == pytest.approx(float(F.cross_entropy(logits.double(), targets)), rel=1e-6)
        for world_size in world_sizes:
            exact = found[world_size][number]
            # Counts are exact. The losses of the samples are rounded to float32, depending on the size of a batch.
            assert exact["accuracy"] == whole["accuracy"]
            assert exact["of_torchmetrics"] == whole["of_torchmetrics"] == pytest.approx(whole["accuracy"])
            assert exact["loss"] == pytest.approx(whole["loss"], rel=1e-7)
            assert exact["auroc"] == pytest.approx(whole["auroc"], rel=1e-6)
            if count % world_size:
                assert exact["padded_stock_accuracy"] != pytest.approx(whole["accuracy"], rel=1e-4)
                assert exact["padded_stock_loss"] != pytest.approx(whole["loss"], rel=1e-4)
    # Without padding, sync_dist=True is not exact either.
    assert found[world_sizes[1]][1]["stock_accuracy"] != pytest.approx(found[1][1]["accuracy"], rel=1e-4)


@pytest.mark.parametrize("reduce", ["mean", torch.mean, lambda values: values.sum(0) / len(values)])
def test_a_metric_that_averages_over_ranks_is_rejected(reduce: Any) -> None:
    class Averaged(Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean_value", torch.zeros(()), dist_reduce_fx=reduce)

        def update(self, values: torch.Tensor) -> None:
            self.mean_value = values.mean()

        def compute(self) -> torch.Tensor:
            return self.mean_value

    with pytest.raises(InputError, match="averages its state mean_value over the ranks"):
        exact_metric(Averaged())
    exact_metric(MeanSquaredError())


class Maximum(Metric):
    """A metric of a user, whose states are of every kind, and are unlike on a rank without samples."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx=None)
        self.add_state("labels", [], dist_reduce_fx="cat")
        self.add_state("largest", torch.tensor(-1), dist_reduce_fx="max")
        # A rank without samples has one dimension less.
        self.add_state("sums", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("squares", torch.zeros(2), dist_reduce_fx=lambda values: values.sum(0))
        self.add_state("last", torch.zeros(0, 2), dist_reduce_fx="cat")

    def update(self, values: torch.Tensor) -> None:
        self.rows.append(values.half())
        self.labels.append(values.long())
        self.largest = torch.maximum(self.largest, values.long().max())
        self.sums = self.sums + values.sum(0)
        self.squares += (values**2).sum(0)
        self.last = torch.cat([self.last, values])
        self.seen = "samples"

    def compute(self) -> dict[str, Any]:
        rows = torch.cat(self.rows).float()
        found = [rows.sum(0), torch.cat(self.labels).sum(0), self.largest, self.sums, self.squares, self.last[-1]]
        return {"seen": self.seen, "values": [value.tolist() for value in found]}


class Dependent(Maximum):
    """Keeps something outside of its states."""

    def update(self, values: torch.Tensor) -> None:
        super().update(values)
        self.first = values[0]


ROWS = (torch.arange(8.0).reshape(4, 1, 2) % 5).unbind()


def maxima(rank: Rank) -> Any:
    own = ROWS[rank.rank * 2 :][:2]
    metric = exact_metric(Maximum(), expected=4)
    for _ in range(2):
        for row in own:
            metric(row)
        computed = metric.compute()
        # The states of this rank are its own again.
        assert len(metric.metric.rows) == len(own)
        assert metric.result() == computed
    dependent = exact_metric(Dependent())
    for row in own:
        dependent.update(row)
    with pytest.raises(InputError, match="Dependent keeps first outside of its states, and it differs"):
        dependent.result()
    return computed


def test_states_of_every_kind_become_those_of_one_process(tmp_path: Path) -> None:
    whole = Maximum()
    for row in ROWS:
        whole.update(row)
    # The third rank has no sample.
    assert results_of_ranks(maxima, tmp_path, 3) == [whole.compute()] * 3


def best_two(rank: Rank) -> Any:
    metrics = {f"top{k}": MulticlassAccuracy(3, top_k=k, average="micro") for k in (1, 2)}
    metric = exact_metric(MetricCollection(metrics))
    for logits in ([3.0, 2.0, 1.0], [2.0, 3.0, 1.0]):
        metric.update(torch.tensor([logits]), torch.tensor([0]))
    return {name: float(value) for name, value in metric.result().items()}


def test_a_collection_whose_metrics_begin_alike(tmp_path: Path) -> None:
    """After the first sample, both have one right of one: they must not share their states from there on."""
    assert results_of_ranks(best_two, tmp_path, 2) == [{"top1": 0.5, "top2": 1.0}] * 2


def test_the_private_parts_of_torchmetrics() -> None:
    kinds = {name: kind for name, (kind, _) in state_reductions(Maximum()).items()}
    of_states = {"rows": "none", "labels": "cat", "largest": "max", "sums": "sum", "squares": "custom", "last": "cat"}
    assert kinds == of_states
    metric = MeanMetric()
    metric.update(1.0)
    assert update_count(metric) == metric.update_count == 1
    set_update_count(metric, 0)
    assert not metric.update_called


def test_wrong_use_of_a_metric_is_rejected() -> None:
    logits, targets = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(InputError, match=r"one value per sample, shape \(4,\).*shape \(\)"):
        exact_metric(F.cross_entropy).update(logits, targets)
    with pytest.raises(InputError, match="the batch has none"):
        exact_metric(MeanMetric(), expected=5).update(1.0)
    used = MeanMetric()
    used.update(1.0)
    with pytest.raises(InputError, match="MeanMetric has samples already"):
        exact_metric(used)
    for options in ({"process_group": "some"}, {"dist_sync_fn": print}):
        with pytest.raises(InputError, match=f"MeanMetric has a {next(iter(options))}"):
            exact_metric(MeanMetric(**options))
    metric = exact_metric(correct, expected=5)
    metric.update(logits, targets)
    assert metric.result(partial=True) == 1
    metric.update(logits, targets)
    with pytest.raises(InputError, match="4 samples were evaluated on all ranks, but `expected` is 5"):
        metric.result()
    metric.update(logits, targets)
    metric.update(logits, targets)
    with pytest.raises(InputError, match="8 samples were evaluated"):
        metric.result(partial=True)
