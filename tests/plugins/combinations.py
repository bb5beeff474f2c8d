"""The plugins together: trainings with a subset of them that are killed, resumed, and compared with uninterrupted ones.

    python tests/plugins/combinations.py            pairwise: each pair of values occurs
    python tests/plugins/combinations.py all 3/40   the third fortieth of all

It prints how many combinations were equal, rejected with a message, and different.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, TensorDataset, get_worker_info
from torchmetrics.classification import MulticlassAccuracy

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
from killed_runs import Training, result_of  # noqa: E402

from lit_mnist.errors import InputError  # noqa: E402
from lit_mnist.plugins import (  # noqa: E402
    ExactCheckpoint,
    ExactDistributedSampler,
    FailureReport,
    Float16OnCPU,
    PortableSyncBatchNorm,
    VerifiedCheckpointIO,
    exact_metric,
)

COUNT, BATCH, VALIDATED = 40, 8, 12
_FIXED = torch.Generator().manual_seed(0)
INPUTS, TARGETS = torch.randn(COUNT, 4, generator=_FIXED), torch.randint(0, 3, (COUNT,), generator=_FIXED)
EVENTS = ("first", "middle", "last", "limit", "accumulation", "validation")
PLUGINS = ("sampler", "batch_norm", "float16", "verified", "exact", "report", "metric")


class Combination(NamedTuple):
    """Which plugins are used, and what happens."""

    sampler: bool
    batch_norm: bool
    float16: bool
    verified: bool
    exact: bool
    report: bool
    metric: bool
    data: str
    workers: int
    ranks: int
    event: str

    @property
    def has_map(self) -> bool:
        """Whether the dataset is map-style, so that it can have a sampler."""
        return self.data in {"map", "stateful"}

    def __str__(self) -> str:
        names = "+".join(name for name in PLUGINS if getattr(self, name)) or "none"
        return f"{names}, {self.data}, {self.workers} workers, {self.ranks} ranks, {self.event}"


VALUES: tuple[tuple[Any, ...], ...] = (
    *[(False, True)] * len(PLUGINS), ("map", "iterable", "stateful", "stateful_stream"), (0, 2), (1, 2), EVENTS,
)  # fmt: skip


def every_combination() -> list[Combination]:
    """Returns all, in an order in which each part has all kinds."""
    found = [Combination(*values) for values in product(*VALUES)]
    random.Random(0).shuffle(found)
    return found


@cache
def subsets() -> tuple[Combination, ...]:
    """Returns all combinations of the other plugins and values; `exact_metric` is in every second one."""

    def has_metric(each: Combination) -> bool:
        others = [
            values.index(value)
            for name, values, value in zip(each._fields, VALUES, each, strict=True)
            if name != "metric"
        ]
        return sum(others) % 2 == 1

    return tuple(each for each in every_combination() if each.metric == has_metric(each))


def pairwise(factors: int = len(VALUES), chosen_from: Callable[[Combination], bool] | None = None) -> list[Combination]:
    """Returns combinations in which each two values of two of the first factors occur together.

    Args:
        factors: The number of factors.
        chosen_from: Which combinations may be chosen; by default all.
    """
    missing = {
        (first, a, second, b)
        for first, second in combinations(range(factors), 2)
        for a in VALUES[first]
        for b in VALUES[second]
    }
    # A part of all has each pair, too, and is searched faster.
    chosen, candidates = [], [each for each in every_combination() if chosen_from is None or chosen_from(each)][:400]
    while missing:
        best = max(candidates, key=lambda each: len(missing & _pairs(each)))
        chosen.append(best)
        missing -= _pairs(best)
    return chosen


@cache
def _pairs(combination: Combination) -> set[tuple[int, Any, int, Any]]:
    return {
        (first, combination[first], second, combination[second])
        for first, second in combinations(range(len(VALUES)), 2)
    }


class Drawing(Dataset[Any]):
    """Samples with noise from the generators of the process, if the checkpoint restores them."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        noise = torch.randn(4) + np.random.rand() if self.draws else 0.0
        return index, (INPUTS[index] + 0.1 * noise).float(), TARGETS[index]


class Stream(IterableDataset[Any]):
    """The part of this rank and worker; with a shuffle buffer, if the checkpoint restores the generators."""

    def __init__(self, draws: bool) -> None:
        self.data = Drawing(draws)

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part, parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if worker:
            part, parts = part * worker.num_workers + worker.id, parts * worker.num_workers
        buffer: list[int] = []
        for index in range(part, COUNT, parts):
            buffer.append(index)
            if len(buffer) > 3:
                yield self.data[buffer.pop(int(torch.randint(len(buffer), ())) if self.data.draws else 0)]
        for index in buffer:
            yield self.data[index]


class Data(pl.LightningDataModule):
    """The loaders, and the sampler's position as docs/plugins.md keeps it."""

    def __init__(self, chosen: Combination) -> None:
        super().__init__()
        self.chosen = chosen
        self.sampler = ExactDistributedSampler(COUNT, BATCH, seed=3) if chosen.sampler else None
        self.uses_sampler = chosen.sampler and chosen.has_map

    def train_dataloader(self) -> Any:
        chosen = self.chosen
        workers, size = {"num_workers": chosen.workers}, BATCH // chosen.ranks
        if chosen.data == "iterable":
            return DataLoader(Stream(chosen.exact), size, **workers)
        from torchdata.stateful_dataloader import StatefulDataLoader

        if chosen.data == "stateful_stream":
            return StatefulDataLoader(Stream(chosen.exact), size, **workers)
        order: dict[str, Any] = {"batch_size": size, "shuffle": chosen.exact}
        if self.sampler is not None:
            order = {"batch_sampler": self.sampler}
        elif chosen.ranks > 1 and not chosen.exact:
            # Lightning shuffles a StatefulDataLoader, and its workers load from the first epoch again on resume.
            order["sampler"] = DistributedSampler(range(COUNT), shuffle=False)  # type: ignore[arg-type]
        if chosen.data == "map":
            return DataLoader(Drawing(chosen.exact), **order, **workers)
        return StatefulDataLoader(TensorDataset(torch.arange(COUNT), INPUTS, TARGETS), **order, **workers)

    def val_dataloader(self) -> Any:
        data = TensorDataset(INPUTS[:VALIDATED], TARGETS[:VALIDATED])
        if self.sampler is None:
            return DataLoader(data, 2)
        return DataLoader(data, batch_sampler=ExactDistributedSampler(data, 4, evaluation=True))

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict(trainer=self.trainer) if self.uses_sampler else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            self.sampler.load_state_dict(state)


class Net(pl.LightningModule):
    """Batch norm, a metric, noise if the checkpoint restores the generators, and a record of each step's samples."""

    def __init__(self, chosen: Combination, folder: Path) -> None:
        super().__init__()
        self.noise = 0.1 if chosen.exact else 0.0
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.accuracy = MulticlassAccuracy(3)
        self.val_loss: Any = None
        self.record = str(folder / "steps-{}.jsonl")
        if chosen.metric:
            self.val_loss = exact_metric(lambda x, y: F.cross_entropy(x.float(), y, reduction="none"), VALIDATED)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        with Path(self.record.format(self.global_rank)).open("a") as file:
            print(json.dumps([self.current_epoch, batch_idx, batch[0].tolist()]), file=file)
        logits = self.net(batch[1] + self.noise * torch.randn_like(batch[1]))
        loss = F.cross_entropy(logits, batch[2])
        self.accuracy(logits, batch[2])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        if self.val_loss is not None:
            self.val_loss.update(logits, batch[1])
        else:
            self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if self.val_loss is not None:
            self.log("val_loss", self.val_loss.result(partial=self.trainer.sanity_checking))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class Kill(Callback):
    """Kills the last rank in the second epoch."""

    signum = signal.SIGKILL

    def __init__(self, event: str) -> None:
        self.event = event

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        due = {"first": batch_idx == 0, "last": is_last, "limit": is_last, "accumulation": batch_idx == 3}
        self._kill(trainer, due.get(self.event, self.event == "middle" and batch_idx == 2))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self._kill(trainer, self.event == "validation" and batch_idx == 1)

    def _kill(self, trainer: Any, due: bool) -> None:
        if due and trainer.current_epoch == 1 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class CombinedTraining(Training):
    """A training with a combination of plugins."""

    chosen: Combination | None = None

    def _fit(self, stop: Any, options: dict[str, Any]) -> None:
        chosen = self.chosen
        assert chosen is not None
        pl.seed_everything(1, verbose=False)
        exact = ExactCheckpoint(self.folder, 2)
        # The sampler's position can be restored at any step. Otherwise, a stock Trainer begins an epoch again.
        often = "every_n_train_steps" if chosen.sampler and chosen.has_map else "every_n_epochs"
        options = {often: 1, "save_on_train_epoch_end": True, "enable_version_counter": False}
        stock = ModelCheckpoint(self.folder, "last", **options)
        callbacks = [exact if chosen.exact else stock, *([FailureReport(self.folder)] if chosen.report else [])]
        parts = {
            "batch_norm": lambda: PortableSyncBatchNorm(30), "float16": lambda: Float16OnCPU(init_scale=1024.0),
            "verified": VerifiedCheckpointIO,
        }  # fmt: skip
        trainer = pl.Trainer(
            accelerator="cpu", devices=chosen.ranks, strategy="ddp" if chosen.ranks > 1 else "auto", max_epochs=3,
            logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
            limit_train_batches=3 if chosen.event == "limit" else 1.0,
            accumulate_grad_batches=2 if chosen.event == "accumulation" else 1,
            plugins=[make() for name, make in parts.items() if getattr(chosen, name)],
            use_distributed_sampler=not chosen.sampler, callbacks=[*callbacks, *([stop] if stop else [])],
        )  # fmt: skip
        module = Net(chosen, self.folder)
        # A stock Trainer does not restore the sums of logged values within an epoch.
        trainer.fit(module, datamodule=Data(chosen), ckpt_path=exact.last, weights_only=True if exact.last else None)
        metrics = None if chosen.exact else {"val_loss"}
        result = result_of(trainer, module, metrics)
        # A StatefulDataLoader keeps its workers, which an exit of the interpreter would end.
        for worker in multiprocessing.active_children():
            worker.terminate()
        (self.folder / f"result-{trainer.global_rank}.json").write_text(json.dumps(result))

    def steps(self) -> list[dict[tuple[int, int], set[str]]]:
        """Returns the samples of each step of each rank; several, if they differed when the step was repeated."""
        found: list[dict[tuple[int, int], set[str]]] = []
        for rank in range(self.world_size):
            steps: dict[tuple[int, int], set[str]] = {}
            for line in (self.folder / f"steps-{rank}.jsonl").read_text().splitlines():
                epoch, batch, indices = json.loads(line)
                steps.setdefault((epoch, batch), set()).add(str(indices))
            found.append(steps)
        return found


def outcome(chosen: Combination, folder: Path) -> str:
    """Returns `equal`, `rejected: ...`, or `different: ...`."""
    whole, killed = (
        CombinedTraining(list, folder / name, chosen.ranks, chosen=chosen)  # type: ignore[arg-type]
        for name in ("whole", "killed")
    )
    done = whole.run()
    if done.code == InputError.exit_code and not list(whole.folder.glob("steps-*")):
        return f"rejected: {done.err.strip().splitlines()[-1]}"
    if done.code:
        return f"different: exit code {done.code}: {done.err[-1500:]}"
    expected, steps = whole.results(), whole.steps()
    done = killed.run(stop=Kill(chosen.event))  # type: ignore[arg-type]
    if done.code not in {-signal.SIGKILL, 128 + signal.SIGKILL}:
        return f"different: not killed: {done.code} {done.err[-1500:]}"
    done = killed.run()
    if done.code:
        return f"different: exit code {done.code} on resume: {done.err[-1500:]}"
    found = killed.results()
    names = [name for name in found[0] if [each[name] for each in found] != [each[name] for each in expected]]
    if killed.steps() != steps:
        names.append("samples")
    return f"different: {', '.join(names)}" if names else "equal"


def count(chosen: Sequence[Combination]) -> Counter[str]:
    """Runs combinations, prints each one that is not equal, and the counts; returns the counts."""
    counts = Counter[str]()
    for combination in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found = outcome(combination, Path(folder))
        counts[found.partition(":")[0]] += 1
        if found != "equal":
            print(f"{combination}: {found}", flush=True)
    parts = [f"{counts[kind]} {kind}" for kind in ("equal", "rejected", "different")]
    print(f"{len(chosen)} combinations: {', '.join(parts)}.", flush=True)
    return counts


def share_of(text: str) -> tuple[Combination, ...]:
    """Returns a share such as 3/40 of all combinations."""
    number, shares = map(int, text.split("/"))
    return subsets()[number - 1 :: shares]


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(bool(count(share_of(sys.argv[2]) if sys.argv[1:2] == ["all"] else pairwise())["different"]))
