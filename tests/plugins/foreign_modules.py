"""Six modules as other people write them: none knows anything of this project."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torchmetrics.classification import MulticlassAccuracy

_DATA = torch.Generator().manual_seed(0)
INPUTS = torch.randn(96, 16, generator=_DATA)
TARGETS = torch.randint(0, 4, (96,), generator=_DATA)
TOKENS = torch.randint(0, 50, (64, 12), generator=_DATA)


class AutoEncoder(LightningModule):
    """An encoder and a decoder with batch norm and dropout, as in Lightning's first example."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1))
        self.decoder = nn.Linear(8, 16)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 12, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 24)


class GAN(LightningModule):
    """Two networks with manual optimization, clipping and schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16))
        self.discriminator = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc, union-attr]
        noise = torch.randn(len(batch[0]), 4, device=self.device)

        self.toggle_optimizer(of_generator)
        loss = F.softplus(-self.discriminator(self.generator(noise))).mean()
        of_generator.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(of_generator, gradient_clip_val=0.5)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        fake = self.discriminator(self.generator(noise).detach())
        loss = (F.softplus(-self.discriminator(batch[0])) + F.softplus(fake)).mean()
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.log("d_loss", loss, prog_bar=True)

    def on_train_epoch_end(self) -> None:
        for schedule in self.lr_schedulers():  # type: ignore[union-attr]
            schedule.step()

    def configure_optimizers(self) -> Any:
        both = [torch.optim.Adam(part.parameters(), 1e-3) for part in (self.generator, self.discriminator)]
        return both, [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in both]

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(INPUTS, TARGETS), 12, shuffle=True, drop_last=True)


class WithMetrics(LightningModule):
    """A classifier of images with torchmetrics and a schedule that follows a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 4)
        )
        self.train_acc, self.val_acc = MulticlassAccuracy(4), MulticlassAccuracy(4)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, torch.Tensor]:
        logits = self.net(batch[0])
        self.train_acc(logits, batch[1])
        self.log("train_acc", self.train_acc, on_epoch=True)
        return {"loss": F.cross_entropy(logits, batch[1])}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        self.val_acc.update(logits, batch[1])
        self.log("val_acc", self.val_acc)
        self.log("val_loss", F.cross_entropy(logits, batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}

    train_dataloader = AutoEncoder.train_dataloader
    val_dataloader = AutoEncoder.val_dataloader


class LanguageModel(LightningModule):
    """A GPT-2 of transformers with a tiny configuration, and a schedule per step."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": 50, "n_positions": 12, "n_embd": 16, "n_layer": 1, "n_head": 2}
        self.model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> Any:
        return DataLoader(TOKENS, 8, shuffle=True)  # type: ignore[arg-type]


class TwoOptimizers(LightningModule):
    """A backbone and a head with an optimizer and a schedule each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.backbone = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU())
        self.head = nn.Linear(8, 4)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.head(self.backbone(batch[0])), batch[1])
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):  # type: ignore[arg-type]
            optimizer.step()
            schedule.step()
        return loss

    def configure_optimizers(self) -> Any:
        slow, fast = torch.optim.SGD(self.backbone.parameters(), 1e-2), torch.optim.Adam(self.head.parameters(), 1e-2)
        return [slow, fast], [
            torch.optim.lr_scheduler.StepLR(slow, 3),
            torch.optim.lr_scheduler.CosineAnnealingLR(fast, 20),
        ]

    train_dataloader = AutoEncoder.train_dataloader


class Shards(IterableDataset[Any]):
    """Samples that are sharded over ranks and workers."""

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if worker := get_worker_info():
            rank, world_size = rank * worker.num_workers + worker.id, world_size * worker.num_workers
        indices = list(range(96))
        random.Random(5).shuffle(indices)
        yield from ((INPUTS[index], TARGETS[index]) for index in indices[rank::world_size])


class Streaming(AutoEncoder):
    """A module with an iterable data set."""

    def train_dataloader(self) -> Any:
        return DataLoader(Shards(), 8)


MODULES: dict[str, Callable[[], LightningModule]] = {
    "autoencoder": AutoEncoder,
    "gan": GAN,
    "torchmetrics": WithMetrics,
    "transformer": LanguageModel,
    "two optimizers": TwoOptimizers,
    "iterable data set": Streaming,
}
