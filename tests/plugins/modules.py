"""Six modules in other people's styles, each with a state that a Lightning checkpoint leaves out."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

_FIXED = torch.Generator().manual_seed(0)
INPUTS = torch.randn(96, 16, generator=_FIXED)
TARGETS = torch.randint(0, 4, (96,), generator=_FIXED)
TOKENS = torch.randint(0, 50, (64, 12), generator=_FIXED)


class Meter:
    """A running mean, as many projects have one."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class AutoEncoder(LightningModule):
    """Noise and dropout in training, outputs kept until the epoch's end, and values that are logged only sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.ReLU())
        self.decoder = nn.Linear(8, 16)
        self.outputs: list[torch.Tensor] = []
        self._meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0] + 0.1 * torch.randn_like(batch[0])
        loss = F.mse_loss(self.decoder(self.encoder(x)), batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True)
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.outputs.append(loss.detach())
        self._meter.add(float(loss))
        return loss

    def on_train_epoch_end(self) -> None:
        self.log_dict({"mean": torch.stack(self.outputs).mean(), "running": self._meter.total / self._meter.count})
        self.outputs.clear()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 6, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 32)


class GAN(LightningModule):
    """Manual optimization; the gradient of one network adds up over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3), nn.LeakyReLU(), nn.Linear(16, 1))
        self.seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc, union-attr]
        noise = torch.randn(len(batch[0]), 4)
        self.toggle_optimizer(first)
        loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = self.discriminator(self.generator(noise).detach())
        other = (F.softplus(-self.discriminator(batch[0])) + F.softplus(fake)).mean()
        self.manual_backward(other / 2)
        if (batch_idx + 1) % 2 == 0:
            second.step()
            second.zero_grad()
        self.untoggle_optimizer(second)
        self.seen += len(batch[0])
        self.log_dict({"g": loss, "d": other, "seen": float(self.seen)}, on_epoch=True, on_step=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(
            self.discriminator.parameters(), 1e-3
        )

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 6, shuffle=True, drop_last=True)


class Augmented(Dataset[Any]):
    """A dataset that draws from every kind of generator, one of them its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(3)

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> Any:
        noise = random.random() + np.random.rand() + self.rng.random()
        return INPUTS[index] + 0.1 * torch.randn(16) + 0.1 * float(noise), TARGETS[index]


class WithMetrics(LightningModule):
    """torchmetrics objects, dropout between the draws of the dataset, and a schedule that follows a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 4))
        self.accuracy, self.val_accuracy = MulticlassAccuracy(4), MulticlassAccuracy(4)
        self.auroc = MulticlassAUROC(4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.auroc.update(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self) -> None:
        self.log("auroc", self.auroc.compute())
        self.auroc.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.val_accuracy(logits, batch[1])
        self.log("val_accuracy", self.val_accuracy)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    def train_dataloader(self) -> Any:
        return DataLoader(Augmented(), 6, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 32)


class TinyGPT2(LightningModule):
    """A transformer of `transformers`, with its own dropout and a schedule per step."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": 50, "n_positions": 12, "n_embd": 8, "n_layer": 1, "n_head": 2}
        self.net = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=80)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return DataLoader(TOKENS, 4, shuffle=True)  # type: ignore[arg-type]


class TwoOptimizers(LightningModule):
    """Two optimizers with schedules, a part that is frozen from the second epoch on, and a generator of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body, self.head = nn.Linear(16, 8), nn.Linear(8, 4)
        self.register_buffer("average", torch.zeros(8))
        self.noise = torch.Generator().manual_seed(5)

    def on_train_epoch_start(self) -> None:
        self.body.bias.requires_grad_(self.current_epoch == 0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        hidden = self.body(batch[0])
        hidden = hidden + 0.1 * torch.randn(hidden.shape, generator=self.noise)
        self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
        loss = F.cross_entropy(self.head(hidden), batch[1])
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()
        self.log("loss", loss, on_epoch=True, reduce_fx="min")

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.body.parameters(), 1e-2)
        second = torch.optim.SGD(self.head.parameters(), 0.1, momentum=0.9)
        schedules = torch.optim.lr_scheduler
        return [first, second], [schedules.ExponentialLR(first, 0.99), schedules.CosineAnnealingLR(second, 40)]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 6, shuffle=True)


class Stream(IterableDataset[Any]):
    """A shuffle buffer over the part of this rank and worker."""

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        part, parts = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if worker:
            part, parts = part * worker.num_workers + worker.id, parts * worker.num_workers
        buffer: list[int] = []
        for index in range(part, len(INPUTS), parts):
            buffer.append(index)
            if len(buffer) > 8:
                chosen = buffer.pop(int(torch.randint(len(buffer), ())))
                yield INPUTS[chosen] + 0.1 * torch.randn(16), TARGETS[chosen]
        for index in buffer:
            yield INPUTS[index], TARGETS[index]


class Streaming(AutoEncoder):
    """An IterableDataset, sharded over ranks and workers; the Trainer does not know the number of batches."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(), 6, num_workers=self.workers)


MODULES: dict[str, Callable[[], LightningModule]] = {
    "autoencoder": AutoEncoder,
    "gan": GAN,
    "metrics": WithMetrics,
    "gpt2": TinyGPT2,
    "two_optimizers": TwoOptimizers,
    "stream": Streaming,
    "stream_with_workers": lambda: Streaming(2),
}
