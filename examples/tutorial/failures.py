"""Two ranks train eight batches. The disk of rank 1 fails once, when it reads batch 4.

python -m examples.tutorial.failures --bug    rank 1 skips what it cannot read
python -m examples.tutorial.failures          rank 1 fails, and all ranks restart from the newest checkpoint
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank
from lit_mnist.errors import LitMnistError

BATCHES, SHARE, SAVE_EVERY = 8, 16, 3
BUG = "--bug" in sys.argv
# Short if a rank will wait in vain. Without a timeout, gloo waits for 30 minutes.
TIMEOUT = timedelta(seconds=4 if BUG else 60)
DATA = load_dataset().train


def read(batch: int, rank: Rank, bad_disk: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a rank's part of a batch."""
    if bad_disk and rank.rank == 1 and batch == 4 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise OSError("batch 4 cannot be read")
    first = SHARE * (rank.world_size * batch + rank.rank)
    return DATA.images[first : first + SHARE] / 255, DATA.labels[first : first + SHARE]


def train(folder: Path, bad_disk: bool, rank: Rank) -> None:
    """The work of each rank."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size, timeout=TIMEOUT)
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(784, 10)))
    optimizer, begin = torch.optim.SGD(model.parameters(), lr=0.05), 0
    if (path := folder / "last.pt").exists():
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["weights"])
        begin = saved["batches"]
        if rank.is_first:
            print(f"all ranks resume with batch {begin}", flush=True)
    for batch in range(begin, BATCHES):
        try:
            images, labels = read(batch, rank, bad_disk)
        except OSError:
            if BUG:
                continue
            raise
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        batches = [torch.tensor(0) for _ in range(rank.world_size)]
        dist.all_gather(batches, torch.tensor(batch))
        if rank.is_first and bad_disk:
            print("averaged the gradients of batch", *(int(number) for number in batches), flush=True)
        if rank.is_first and ((batch + 1) % SAVE_EVERY == 0 or batch + 1 == BATCHES):
            torch.save({"batches": batch + 1, "weights": model.state_dict()}, folder / "new.pt")
            # Whoever reads the file sees the old one or the new one, and never a part.
            (folder / "new.pt").rename(path)
    dist.barrier()
    dist.destroy_process_group()


def run(folder: Path, *, bad_disk: bool) -> dict[str, torch.Tensor]:
    """Trains on two ranks, which may restart once, and returns the weights."""
    launch(partial(train, folder, bad_disk), world_size=2, max_restarts=0 if BUG else 1, logs=folder)
    return torch.load(folder / "last.pt", weights_only=True)["weights"]


def main() -> int:
    """Trains with the bad disk and with a good one."""
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    # DDP imports it, which takes seconds: here once, and not on each rank within the timeout.
    importlib.import_module("torch._dynamo")
    with tempfile.TemporaryDirectory() as bad, tempfile.TemporaryDirectory() as good:
        try:
            weights, expected = run(Path(bad), bad_disk=True), run(Path(good), bad_disk=False)
        except LitMnistError as error:
            print(error)
            return error.exit_code
        same = all(torch.equal(weights[name], expected[name]) for name in expected)
        print("the same weights as with a good disk" if same else "other weights than with a good disk")
    return 0


if __name__ == "__main__":
    sys.exit(main())
