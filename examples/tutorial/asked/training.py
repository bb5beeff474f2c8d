"""Questions about losses, gradients and metrics.

python -m examples.tutorial.asked.training loss|gradient|metric|unused
"""

from __future__ import annotations

import logging
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from examples.tutorial.asked.ranks import on_two_ranks
from lit_mnist.data.dataset import load_dataset
from lit_mnist.plugins import ExactDistributedSampler

DIGITS = load_dataset().train


def batch(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns images and labels, in 64 bits."""
    return DIGITS.images[rows].double().flatten(1) / 255, DIGITS.labels[rows]


def linear() -> nn.Module:
    """Returns a network with the same weights in each process."""
    torch.manual_seed(1)
    return nn.Linear(784, 10).double()


def loss() -> None:
    """Is the loss of two ranks that of one process?"""

    def own(rank: int) -> str:
        images, labels = batch(slice(32 * rank, 32 * rank + 32))
        value = F.cross_entropy(linear()(images), labels)
        mean = value.clone()
        dist.all_reduce(mean)
        return f"its loss {value:.4f}, the mean of the ranks {mean / 2:.4f}"

    on_two_ranks("32 images each", own)
    images, labels = batch(slice(64))
    print(f"one process with 64 images: {F.cross_entropy(linear()(images), labels):.4f}")


def gradient() -> None:
    """Which gradient does DDP give to two ranks with 32 images each?"""

    def of(model: nn.Module, rows: slice) -> torch.Tensor:
        images, labels = batch(rows)
        F.cross_entropy(model(images), labels).backward()
        return next(model.parameters()).grad

    def own(rank: int) -> str:
        rows = slice(32 * rank, 32 * rank + 32)
        found = of(DistributedDataParallel(linear()), rows)
        whole, part = of(linear(), slice(64)), of(linear(), rows)
        to_whole, to_part = (float((found - other).norm() / other.norm()) for other in (whole, part))
        return f"differs by {to_whole:.4f} from that of all 64 images, by {to_part:.4f} from that of its own 32"

    on_two_ranks("the gradient", own)


class Ones(LightningModule):
    """Logs the mean of ones."""

    def validation_step(self, samples: Any, batch_idx: int) -> None:
        """Logs 1."""
        self.log("one", torch.ones(len(samples)).mean(), batch_size=len(samples), sync_dist=True)
        self.log("own", samples.float().mean(), batch_size=len(samples))


def metric() -> None:
    """What does Lightning log as the mean of 25 ones, 13 on rank 0 and 12 on rank 1?"""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")

    def own(rank: int) -> str:
        sampler = ExactDistributedSampler(25, 25, evaluation=True)
        loader = DataLoader(torch.arange(25), batch_sampler=sampler)  # type: ignore[arg-type]
        options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "use_distributed_sampler": False}
        trainer = Trainer(accelerator="cpu", devices=2, **options)
        found = trainer.validate(Ones(), loader, verbose=False)[0]
        return f"with sync_dist {found['one']:.4f} instead of 1; without, its own mean {found['own']:.1f}"

    on_two_ranks("logged", own)


class TwoHeads(nn.Module):
    """A network with a head that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns the result of one head."""
        return self.used(inputs)


def unused() -> None:
    """How many steps can a network train that has an unused head?"""

    def train(find: bool) -> str:
        model = DistributedDataParallel(TwoHeads(), find_unused_parameters=find)
        for step in range(3):
            try:
                model(torch.ones(1, 4)).sum().backward()
            except RuntimeError as error:
                return f"step {step}: {str(error).partition('.')[0]}"
        return "3 steps"

    on_two_ranks("find_unused_parameters=False", lambda _: train(find=False))
    on_two_ranks("find_unused_parameters=True", lambda _: train(find=True))


if __name__ == "__main__":
    {"loss": loss, "gradient": gradient, "metric": metric, "unused": unused}[sys.argv[1]]()
