"""Programs with Fabric, with pytorch_lightning, and with a trainer of their own; correct unless a code is named.

Each function is a training of its own, on each rank; each class is a module.
"""

import os
from pathlib import Path

import lightning as L
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EXPECTED = {
    "fabric_loop": ("", "", "Fabric with accumulation, clipping and a reduced validation loss"),
    "old_lightning": ("", "", "a Trainer of pytorch_lightning in a script, with EarlyStopping and ModelCheckpoint"),
    "mean_of_scores": (
        "LD024",
        "",
        "ModelCheckpoint keeps the best mean of the F1 scores of the ranks; none is printed",
    ),
    "seed_everything_by_rank": ("LD002", "", "seed_everything(3 + rank): Lightning seeds the ranks' samplers by it"),
    "manual_callbacks": ("", "", "a trainer of its own with a list of callbacks"),
    "fabric_without_loaders": ("LD002", "", "Fabric without setup_dataloaders"),
    "fabric_divides_again": ("LD014", "", "Fabric with a loss that is divided by the number of ranks"),
    "OldSum": ("LD014", "", "a module of pytorch_lightning with a loss that is a sum"),
    "OldIncomplete": ("LD019", "", "a module of pytorch_lightning whose optimizer lacks the first layer"),
    "estimated_length": ("", "", "a Trainer in a script, with a schedule of estimated_stepping_batches steps"),
    "EstimatedLength": ("", "", "a module with a schedule of estimated_stepping_batches steps"),
    "OldHealthy": ("", "", "a module of pytorch_lightning"),
    "average_of_callback_lost": (
        "LD025",
        "",
        "a script resumes from ModelCheckpoint's last.ckpt, and a callback's average is not in it",
    ),
    "average_of_callback_kept": ("", "", "the same, but the callback has state_dict and load_state_dict"),
}


class Classifier(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, 3))

    def forward(self, x, labels=None):
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits} if labels is not None else logits


def tensors(size, seed):
    x = torch.randn(size, 12, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :3].argmax(1))


def fabric_loop():
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    torch.manual_seed(4 + fabric.global_rank)
    with fabric.rank_zero_first():
        train, held_out = tensors(64, 1), tensors(16, 2)
    model = Classifier()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    loader, held_out = fabric.setup_dataloaders(DataLoader(train, 4, shuffle=True), DataLoader(held_out, 4))
    for epoch in range(2):
        model.train()
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            done = number % 2 == 1
            with fabric.no_backward_sync(model, enabled=not done):
                fabric.backward(model(x, y)["loss"] / 2)
            if done:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            sums = [torch.tensor([F.cross_entropy(model(x), y, reduction="sum"), len(y)]) for x, y in held_out]
        total = fabric.all_reduce(torch.stack(sums).sum(0), reduce_op="sum")
        fabric.print("validation", (total[0] / total[1]).item())
        fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer, "epoch": epoch})
    if dist.is_initialized():
        dist.destroy_process_group()


class OldModule(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Classifier(dropout=0.0)

    def training_step(self, batch, batch_idx):
        loss = self.model(*batch)["loss"]
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def estimated(module):
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    steps = module.trainer.estimated_stepping_batches
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Estimated(OldModule):
    def configure_optimizers(self):
        return estimated(self)


class ScoresOfRanks(OldModule):
    def on_validation_epoch_start(self):
        self.found = []

    def validation_step(self, batch, batch_idx):
        self.found.append(torch.stack([self.model(batch[0]).argmax(1) == 0, batch[1] == 0]))

    def on_validation_epoch_end(self):
        guessed, right = torch.cat(self.found, 1)
        score = 2 * (guessed & right).sum() / (guessed.sum() + right.sum()).clamp(min=1)
        self.log("val_f1", score, sync_dist=True)


def old_lightning():
    _fit_old(3)


def mean_of_scores():
    _fit_old(3, ScoresOfRanks, "val_f1")


def estimated_length():
    _fit_old(3, Estimated)


def seed_everything_by_rank():
    _fit_old(3 + int(os.environ["RANK"]))


def _fit_old(seed, module=OldModule, monitor="val_loss"):
    pl.seed_everything(seed, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp" if int(os.environ["WORLD_SIZE"]) > 1 else "auto",
        max_epochs=2,
        callbacks=[
            pl.callbacks.EarlyStopping(monitor, patience=3),
            pl.callbacks.ModelCheckpoint(dirpath="kept", monitor=monitor, save_last=True),
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(), DataLoader(tensors(64, 1), 4, shuffle=True), DataLoader(tensors(32, 2), 4))


class Ema(L.Callback):
    def on_fit_start(self, trainer, module):
        if not hasattr(self, "average"):
            self.average = {name: value.detach().clone() for name, value in module.state_dict().items()}

    def on_train_batch_end(self, trainer, module, *args):
        for name, value in module.state_dict().items():
            self.average[name].lerp_(value, 0.1)

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            torch.save(self.average, "average.pt")


class KeptEma(Ema):
    def state_dict(self):
        return {"average": self.average}

    def load_state_dict(self, state):
        self.average = state["average"]


class New(L.LightningModule):
    training_step, configure_optimizers = OldModule.training_step, OldModule.configure_optimizers

    def __init__(self):
        super().__init__()
        self.model = Classifier(dropout=0.0)


def average_of_callback_lost():
    fit_with(Ema())


def average_of_callback_kept():
    fit_with(KeptEma())


def fit_with(callback):
    L.seed_everything(5, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp" if int(os.environ["WORLD_SIZE"]) > 1 else "auto",
        max_epochs=2,
        callbacks=[callback, L.pytorch.callbacks.ModelCheckpoint(dirpath="kept", save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    last = Path("kept/last.ckpt")
    trainer.fit(New(), DataLoader(tensors(64, 1), 4, shuffle=True), ckpt_path=last if last.exists() else None)


class Callback:
    def batch_end(self, trainer):
        pass

    def epoch_end(self, trainer):
        pass


class Average(Callback):
    def __init__(self):
        self.value, self.count = torch.zeros(()), 0

    def batch_end(self, trainer):
        self.value += trainer.loss.detach()
        self.count += 1

    def epoch_end(self, trainer):
        total = torch.stack([self.value, torch.tensor(float(self.count))])
        dist.all_reduce(total)
        if dist.get_rank() == 0:
            print("mean loss", (total[0] / total[1]).item())
        self.__init__()


class Saving(Callback):
    def epoch_end(self, trainer):
        if dist.get_rank() == 0:
            parts = (trainer.model.module, trainer.optimizer)
            torch.save([part.state_dict() for part in parts], "callbacks.pt")
        dist.barrier()


class OwnTrainer:
    def __init__(self, model, optimizer, loader, callbacks):
        self.model, self.optimizer, self.loader, self.callbacks = model, optimizer, loader, callbacks

    def call(self, event):
        for callback in self.callbacks:
            getattr(callback, event)(self)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                self.loss = self.model(x, y)["loss"]
                self.loss.backward()
                self.optimizer.step()
                self.call("batch_end")
            self.call("epoch_end")


def manual_callbacks():
    dist.init_process_group("gloo")
    data = tensors(64, 1)
    loader = DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data))
    model = nn.parallel.DistributedDataParallel(Classifier(dropout=0.0))
    OwnTrainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader, [Average(), Saving()]).fit(2)
    dist.destroy_process_group()


def fabric_without_loaders():
    _fabric(1.0, sharded=False)


def fabric_divides_again():
    _fabric(1.0 / int(os.environ["WORLD_SIZE"]), sharded=True)


def _fabric(factor, sharded):
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    torch.manual_seed(2)
    model = Classifier(dropout=0.0)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = DataLoader(tensors(64, 1), 4, shuffle=True)
    loader = fabric.setup_dataloaders(loader) if sharded else loader
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            fabric.backward(model(x, y)["loss"] * factor)
            optimizer.step()
    if dist.is_initialized():
        dist.destroy_process_group()


class OldSum(OldModule):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1], reduction="sum")

    def train_dataloader(self):
        return DataLoader(tensors(64, 1), 4, shuffle=True)


class OldHealthy(OldModule):
    def train_dataloader(self):
        return DataLoader(tensors(64, 1), 4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(tensors(32, 2), 4)


class EstimatedLength(OldHealthy):
    def configure_optimizers(self):
        return estimated(self)


class OldIncomplete(OldHealthy):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.net[3].parameters(), 1e-2)
