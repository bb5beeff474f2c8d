"""A training whose samples of each step are known, interrupted at a step and resumed by ExactCheckpoint."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.callbacks import Callback
from ranks import stock_trainer
from torch.utils.data import (
    DataLoader,
    Dataset,
)

from lit_mnist.plugins import ExactCheckpoint, ExactDistributedSampler

COUNT, PER_EPOCH = 64, 8


class Samples(Dataset[Any]):
    """Each sample has its index, and noise from the generators of the process."""

    def __init__(self, draws: bool = False) -> None:
        self.draws, self.loaded = draws, 0

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        self.loaded += 1
        return float(index), float(torch.rand(()) if self.draws else 0.0)


class Net(LightningModule):
    """Remembers the samples of each step, also over a resume with ExactCheckpoint."""

    def __init__(self, loader: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.net, self.seen = torch.nn.Linear(1, 1), list[Any]()
        if loader is not None:
            self.train_dataloader = loader  # type: ignore[method-assign]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append([self.current_epoch, batch[0].int().tolist()])
        noise = torch.rand(len(batch[0]))
        loss: torch.Tensor = self.net((batch[0] / COUNT + batch[1] + noise).float().unsqueeze(1)).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(LightningDataModule):
    """The data module of docs/plugins.md, or with the number of batches instead of the Trainer."""

    def __init__(self, dataset: Any, workers: int = 0, *, by_number: bool = False) -> None:
        super().__init__()
        self.dataset, self.workers, self.by_number = dataset, workers, by_number
        self.sampler = ExactDistributedSampler(dataset, COUNT // PER_EPOCH, seed=1)

    def train_dataloader(self) -> Any:
        return DataLoader(self.dataset, batch_sampler=self.sampler, num_workers=self.workers)

    def state_dict(self) -> dict[str, Any]:
        assert self.trainer is not None
        if self.by_number:
            return self.sampler.state_dict(self.trainer.fit_loop.batch_idx + 1)
        return self.sampler.state_dict(trainer=self.trainer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


class At(Callback):
    """Does something at the end of a step."""

    def __init__(self, step: int, work: Callable[[Any], None]) -> None:
        self.step, self.work = step, work

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.work(trainer)


class TrainingInterruptedError(RuntimeError):
    """The training is interrupted."""


def interrupt(trainer: Any) -> None:
    raise TrainingInterruptedError


def fit(folder: Path, data: Any, *callbacks: Callback, exact: bool = True, **options: Any) -> tuple[Net, Any]:
    """Trains, or resumes an exact training; an interruption is expected."""
    seed_everything(1, verbose=False)
    module, checkpoint = options.pop("module", Net)(), ExactCheckpoint(folder, 1)
    path = options.pop("ckpt_path", checkpoint.last if exact else None)
    trainer = stock_trainer(
        options.pop("ranks", 1), folder, enable_checkpointing=True,
        callbacks=[*callbacks, *([checkpoint] if exact else [])],
        **{"max_epochs": 3, "use_distributed_sampler": False, **options},
    )  # fmt: skip
    with suppress(TrainingInterruptedError):
        trainer.fit(module, datamodule=data, ckpt_path=path, weights_only=True if path else None)
    return module, trainer
