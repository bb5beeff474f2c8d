"""What each plugin costs under a stock Trainer, with a usual module and a usual DataLoader, on two ranks.

    python -m benchmarks.plugins ExactCheckpoint --batch-size 64

Prints the images per second over the median step after the warm-up, or for a metric the seconds of a validation.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import LayerSync
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.plugin_topics import (
    ALL,
    EXCHANGES,
    PLUGIN_STEPS,
    PLUGINS,
    STEPS_BETWEEN_SAVES,
    STOCK,
    STOCK_16_BIT,
    STOCK_DEFAULTS,
    STOCK_EXCHANGING,
    STOCK_SAVING,
    STOCK_VALIDATING,
)
from lit_mnist.data.digits.mnist import load_mnist
from lit_mnist.distributed.peer_exchange import PeerExchange
from lit_mnist.plugins import (
    ExactCheckpoint,
    ExactDistributedSampler,
    FailureReport,
    Float16OnCPU,
    KeepMemory,
    PortableSyncBatchNorm,
    VerifiedCheckpointIO,
    exact_metric,
)

_RANKS, _WARM_UP, _VALIDATED = 2, 20, 5000
_STOCK = (STOCK, STOCK_SAVING, STOCK_16_BIT, STOCK_VALIDATING, STOCK_DEFAULTS, STOCK_EXCHANGING, EXCHANGES)


class _Module(LightningModule):
    """A small ConvNet, as most scripts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(7 * 7 * 32, 10)),
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss."""
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the loss as most scripts do."""
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), sync_dist=True)


class _ExactModule(_Module):
    """Logs the exact loss."""

    def __init__(self) -> None:
        super().__init__()
        self.val_loss = exact_metric(partial(F.cross_entropy, reduction="none"))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Adds a batch."""
        self.val_loss.update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        """Logs the loss of all ranks."""
        self.log("val_loss", self.val_loss.result())


class _Exchange(torch.autograd.Function):
    """Sends in both passes what synchronized batch norm sends, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: PeerExchange) -> torch.Tensor:
        """Exchanges the statistics of each channel and a count."""
        ctx.exchange, ctx.channels = exchange, x.shape[1]
        exchange.all_gather(x.new_zeros(2 * ctx.channels + 1))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Exchanges two sums for each channel."""
        ctx.exchange.all_gather(grad.new_zeros(2 * ctx.channels))
        return grad, None


class _ExchangesOnly(LayerSync):
    """The bound of a synchronized batch norm: what it must send, beside torch's own batch norm."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Adds the exchanges to each batch norm."""
        exchange = PeerExchange(120.0)
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.register_forward_hook(lambda layer, _, output: _Exchange.apply(output, exchange))
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Leaves the model as it is: the process ends."""
        return model


def _compared_with(name: str) -> str:
    """Returns the variant of a stock Trainer that does the same without a plugin; for one of them, its like."""
    return STOCK_SAVING if name in {STOCK_EXCHANGING, STOCK_DEFAULTS} else PLUGINS.get(name, name)


class _Clock(Callback):
    def __init__(self) -> None:
        self.times: list[float] = []
        self.seconds = 0.0

    def on_validation_start(self, trainer: Trainer, *args: Any) -> None:
        """Notes when a validation begins."""
        self.seconds = -time.perf_counter()

    def on_validation_end(self, trainer: Trainer, *args: Any) -> None:
        """Notes how long the last validation took, with the reduction over the ranks."""
        self.seconds += time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Notes when a batch begins; the time to the next includes loading and saving."""
        self.times.append(time.perf_counter())


def _trainer(name: str, folder: Path, clock: _Clock) -> Trainer:
    saves = _compared_with(name) == STOCK_SAVING
    callbacks: list[Any] = [clock]
    if name in {"ExactCheckpoint", ALL}:
        callbacks.append(ExactCheckpoint(folder, every_n_train_steps=STEPS_BETWEEN_SAVES))
    elif saves:
        callbacks.append(ModelCheckpoint(folder, every_n_train_steps=STEPS_BETWEEN_SAVES, save_top_k=1))
    callbacks += [FailureReport(folder)] if name in {"FailureReport", ALL} else []
    callbacks += [KeepMemory()] if name in {"KeepMemory", ALL} else []
    parts: list[Any] = [VerifiedCheckpointIO()] if name in {"VerifiedCheckpointIO", ALL} else []
    parts += [_ExchangesOnly()] if name in {EXCHANGES, STOCK_EXCHANGING} else []
    parts += [PortableSyncBatchNorm()] if name in {"PortableSyncBatchNorm", ALL} else []
    parts += [Float16OnCPU()] if name == "Float16OnCPU" else []
    return Trainer(
        accelerator="cpu",
        devices=_RANKS,
        strategy="ddp",
        max_steps=PLUGIN_STEPS,
        callbacks=callbacks,
        plugins=parts,
        precision="bf16-mixed" if name == STOCK_16_BIT else None,
        use_distributed_sampler=name not in {"ExactDistributedSampler", ALL},
        enable_checkpointing=saves,
        logger=TensorBoardLogger(folder) if name == STOCK_DEFAULTS else False,
        enable_progress_bar=name == STOCK_DEFAULTS,
        enable_model_summary=False,
    )


def _loader(name: str, batch: int) -> DataLoader[Any]:
    _, _, train, _ = load_mnist(None)
    data = TensorDataset(train.images.unsqueeze(1).float() / 255, train.labels.long())
    if name in {"ExactDistributedSampler", ALL}:
        return DataLoader(data, batch_sampler=ExactDistributedSampler(data, batch, seed=1))
    return DataLoader(data, batch // _RANKS, shuffle=True)


def _validate(trainer: Trainer, name: str, batch: int, clock: _Clock) -> None:
    """Prints the images per second of the second of two validations."""
    _, _, test, _ = load_mnist(None)
    data = TensorDataset(test.images[:_VALIDATED].unsqueeze(1).float() / 255, test.labels[:_VALIDATED].long())
    module = _ExactModule() if name == "exact_metric" else _Module()
    for _ in range(2):
        trainer.validate(module, DataLoader(data, batch // _RANKS), verbose=False)
    if trainer.is_global_zero:
        print(json.dumps({"images_per_s": _VALIDATED / clock.seconds}))


def main() -> None:
    """Trains or validates with one plugin, and prints the images per second."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=[*_STOCK, *PLUGINS])
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(options.name, Path(folder), clock)
        if _compared_with(options.name) != STOCK_VALIDATING:
            trainer.fit(_Module(), _loader(options.name, options.batch_size))
        if _compared_with(options.name) == STOCK_VALIDATING:
            _validate(trainer, options.name, options.batch_size, clock)
        elif trainer.is_global_zero:
            steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)][_WARM_UP:]
            mean: Callable[[list[float]], float] = (
                statistics.fmean if _compared_with(options.name) == STOCK_SAVING else statistics.median
            )
            print(json.dumps({"images_per_s": options.batch_size / mean(steps)}))


if __name__ == "__main__":
    main()
