"""How long a resumed training run takes to its first new step, by the kind of its dataloader, after few and many steps.

    python -m benchmarks.resume seekable --steps 10000

Trains a small network under a stock Trainer with `ExactCheckpoint` for a number of steps, resumes it, and prints the
seconds from the call of `fit` to the first new step, and those of the training run before.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from benchmarks.plugin_topics import RESUMED
from lit_mnist.plugins import ExactCheckpoint, ExactDistributedSampler

_BATCH, _SAMPLES, _FEATURES, _CLASSES = 64, 64 * 20_000, 32, 10


class _Module(LightningModule):
    """A linear layer, so that loading is a large part of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(_FEATURES, _CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Stream(IterableDataset[Any]):
    """Samples one after another."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[number] for number in range(len(self.data)))


class _Samples(Dataset[Any]):
    """Samples by their index, read by a class of the user's."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


class _InterruptedError(Exception):
    """Ends a training run within its epoch."""


class _Clock(Callback):
    """Measures the time to the first batch and to step `last`, after which the run is interrupted.

    Args:
        first: The step that the first batch must have.
        last: The step.
    """

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.to_first, self.began = 0.0, time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Measures the time to the first batch, or ends the run."""
        step = trainer.global_step
        if step == self.first:
            assert batch_idx == step, "the run has not resumed within its epoch"
            self.to_first = time.perf_counter() - self.began
        if step > self.last:
            self.seconds = time.perf_counter() - self.began
            raise _InterruptedError


def _loader(kind: str) -> Any:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(_SAMPLES, _FEATURES, generator=generator)
    data = TensorDataset(images, torch.randint(_CLASSES, (_SAMPLES,), generator=generator))
    if kind == "seekable":
        return DataLoader(data, batch_sampler=ExactDistributedSampler(data, _BATCH, seed=1))
    if kind == "StatefulDataLoader":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(data, _BATCH, shuffle=True)
    if kind == "iterable":
        return DataLoader(_Stream(data), _BATCH)
    return DataLoader(data if kind == "TensorDataset" else _Samples(data), _BATCH, shuffle=True)


def _fit(kind: str, folder: str, first: int, last: int) -> _Clock:
    """Trains from a step to another, at which it saves."""
    seed_everything(1, verbose=False)
    module, loader, save = _Module(), _loader(kind), ExactCheckpoint(folder, every_n_train_steps=last)
    clock = _Clock(first, last)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[clock, save],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with suppress(_InterruptedError):
        trainer.fit(module, loader, ckpt_path=save.last)
    return clock


def main() -> None:
    """Trains, resumes, and prints the seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=RESUMED)
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trained = _fit(options.kind, folder, 0, options.steps)
        resumed = _fit(options.kind, folder, options.steps, options.steps + 1)
    print(json.dumps({"seconds": resumed.to_first, "train_seconds": trained.seconds}))


if __name__ == "__main__":
    main()
