"""Checkpoints on two ranks: a training is killed and resumed. Does it end with the weights of one that was not?

    python -m examples.tutorial.checkpoints --bug    resumes without one part of the checkpoint each time
    python -m examples.tutorial.checkpoints          resumes with all parts

The first of two launches ends with a SIGKILL, the second one resumes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import LitMnistError

RANKS, SAMPLES, BATCH, EPOCHS, SAVE_EVERY, KILLED_IN = 2, 1000, 25, 2, 10, 34
TRAIN = load_dataset().train
DATASET = TensorDataset(TRAIN.images[:SAMPLES].double() / 255, TRAIN.labels[:SAMPLES])


def save(path: Path, rank: Rank, parts: dict[str, Any], **position: int) -> None:
    """Saves everything that a step changes; every rank must call it."""
    # Rank 0 writes the file, but it has only its own generator.
    generators = [torch.get_rng_state() for _ in range(RANKS)]
    dist.all_gather(generators, torch.get_rng_state())
    if rank.is_first:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**states, **position, "generators": generators}, f"{path}.tmp")
        # A process that is killed before this line leaves the old file, and after it the new one.
        os.replace(f"{path}.tmp", path)  # noqa: PTH105


def train(rank: Rank, path: Path, saved: dict[str, Any], killed_in: int = 0) -> tuple[torch.Tensor, int]:
    """Trains from what was saved; returns the weights, and the number of samples in the last epoch of this call."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))
    model = DistributedDataParallel(net.double())
    sampler = DistributedSampler(DATASET, seed=1)
    loader = DataLoader(DATASET, BATCH, sampler=sampler)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    parts = {"weights": net, "optimizer": optimizer, "schedule": schedule}
    for name in parts.keys() & saved.keys():
        parts[name].load_state_dict(saved[name])
    # Each rank draws dropout masks of its own.
    torch.manual_seed(1 + rank.rank)

    first_batch, generators, trained = saved.get("batch", 0), saved.get("generators"), 0
    for epoch in range(saved.get("epoch", 0), EPOCHS):
        sampler.set_epoch(epoch)
        trained = 0
        for batch, (images, labels) in enumerate(loader):
            if batch < first_batch:
                continue
            if generators is not None:
                # Not before the loop: a DataLoader draws a number when it begins.
                torch.set_rng_state(generators[rank.rank])
                generators = None
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            if rank.rank == 1 and epoch * len(loader) + batch + 1 == killed_in:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            schedule.step()
            trained += len(labels) * RANKS
            if (batch + 1) % SAVE_EVERY == 0:
                save(path, rank, parts, epoch=epoch, batch=batch + 1)
        first_batch = 0
    return nn.utils.parameters_to_vector(net.parameters()).detach(), trained


def interrupted(folder: Path, rank: Rank) -> None:
    """The work of each rank: a training to its end, and the same one again, which is killed."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    end, _ = train(rank, folder / "whole.pt", {})
    if rank.is_first:
        torch.save(end, folder / "end.pt")
    train(rank, folder / "last.pt", {}, killed_in=KILLED_IN)


def resumed(folder: Path, rank: Rank) -> None:
    """The work of each rank after the kill."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    saved, expected = (torch.load(folder / name, weights_only=True) for name in ("last.pt", "end.pt"))
    begin = torch.cat([weight.flatten() for weight in saved["weights"].values()])
    for missing in ("optimizer", "schedule", "generators", "batch") if "--bug" in sys.argv else (None,):
        end, trained = train(rank, folder / "new.pt", {name: saved[name] for name in saved if name != missing})
        error = float((end - expected).norm() / (expected - begin).norm())
        if rank.is_first:
            weights = (
                "bit-identical" if torch.equal(end, expected) else f"off by {error:.2f} x the change since the save"
            )
            what = f"without {missing}" if missing else "with all parts"
            print(f"{what}: {trained} more samples in epoch {saved['epoch']}, weights {weights}")
    dist.destroy_process_group()


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        try:
            launch(partial(interrupted, Path(name)), world_size=RANKS, max_restarts=0, logs=Path(name))
        except LitMnistError as error:
            print(error)
        launch(partial(resumed, Path(name)), world_size=RANKS, max_restarts=0, logs=Path(name))
