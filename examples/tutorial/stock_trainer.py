"""Lightning on two CPUs: what a stock Trainer does for you, what it does not, and the template that does.

python -m examples.tutorial.stock_trainer --bug    a usual LightningModule under a stock Trainer
python -m examples.tutorial.stock_trainer          LitClassifier and MNISTDataModule under LitTrainer
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_mnist import LitClassifier, LitTrainer, MNISTDataModule
from lit_mnist.data.digits.split import normalize
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank
from lit_mnist.models.convnet import ConvNet
from lit_mnist.plugins import ExactDistributedSampler
from lit_mnist.plugins.lightning_messages import hide_messages

RANKS, VALIDATED = 2, 101
DATA = MNISTDataModule(train_size=640, val_size=VALIDATED)
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
ON_CPUS: dict[str, Any] = {"accelerator": "cpu", "devices": RANKS, "max_epochs": 1, "num_sanity_val_steps": 0, **QUIET}


class Classifier(LightningModule):
    """What many would write."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ConvNet()
        self.validated = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Logs the mean of a batch, which is 1."""
        labels = batch[1]
        self.validated += len(labels)
        self.log("one", torch.ones(len(labels)).mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.05)


def watched(net: nn.Module) -> set[torch.dtype]:
    """Returns a set to which the network adds the types that its first layer computes in."""
    dtypes: set[torch.dtype] = set()
    net.layer1[0].register_forward_hook(lambda layer, inputs, output: dtypes.add(output.dtype))
    return dtypes


def stock(rank: Rank) -> None:
    """Trains and validates under stock Trainers, each with one of the options."""
    train, validation = (
        TensorDataset(normalize(split.images.unsqueeze(1).float()), split.labels)
        for split in (DATA.batches.splits.train, DATA.batches.splits.validation)
    )
    module = Classifier()
    dtypes = watched(module.net)
    Trainer(precision="16-mixed", **ON_CPUS).fit(module, DataLoader(train, batch_size=32, shuffle=True))
    if rank.is_first:
        print(f"precision='16-mixed' computed in {dtypes}", flush=True)
    try:
        Trainer(sync_batchnorm=True, **ON_CPUS).fit(Classifier(), DataLoader(train, batch_size=32))
    except ValueError as error:
        if rank.is_first:
            print(f"sync_batchnorm=True: {error}")

    padded = Classifier()
    Trainer(**ON_CPUS).validate(padded, DataLoader(validation, batch_size=64), verbose=False)
    own = DataLoader(validation, batch_sampler=ExactDistributedSampler(validation, batch_size=64, evaluation=True))
    found = Trainer(use_distributed_sampler=False, **ON_CPUS).validate(Classifier(), own, verbose=False)
    dist.all_reduce(counted := torch.tensor(padded.validated))
    if rank.is_first:
        print(f"Lightning's sampler: {int(counted)} samples of {VALIDATED} validated")
        print(f"a sampler without padding: the mean of ones is {found[0]['one']:.4f} with sync_dist=True", flush=True)


def template(rank: Rank) -> None:
    """Trains and validates with the template."""
    module = LitClassifier()
    dtypes = watched(module.net)
    trainer = LitTrainer(precision="16-mixed", **ON_CPUS)
    trainer.fit(module, datamodule=DATA)
    means = [torch.zeros(16) for _ in range(RANKS)]
    dist.all_gather(means, module.net.layer1[1].running_mean)
    if rank.is_first:
        print(f"precision='16-mixed' computed in {dtypes}")
        print(f"batch norm: running means of the ranks differ by {float((means[0] - means[1]).abs().max()):.4f}")
        print(f"{module.metrics.last.count} samples of {VALIDATED} validated")


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    hide_messages()
    assert DATA.batches.splits
    with tempfile.TemporaryDirectory() as folder:
        launch(stock if "--bug" in sys.argv else template, world_size=RANKS, max_restarts=0, logs=Path(folder))
