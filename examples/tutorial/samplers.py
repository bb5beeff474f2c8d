"""Which samples do two ranks train on, in three epochs of 1,000 samples?

python -m examples.tutorial.samplers --no-sampler      each rank shuffles all samples
python -m examples.tutorial.samplers --no-set-epoch    a DistributedSampler that does not know the epoch
python -m examples.tutorial.samplers                   a DistributedSampler that does
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lit_mnist.data.dataset import load_dataset
from lit_mnist.distributed.launcher import launch
from lit_mnist.distributed.rank import Rank

RANKS, BATCH, EPOCHS, SAMPLES = 2, 50, 3, 1000
DATA = load_dataset().train
# The index of a sample is part of it, so that we can see which samples arrive.
DATASET = TensorDataset(DATA.images[:SAMPLES], DATA.labels[:SAMPLES], torch.arange(SAMPLES))


def train(rank: Rank) -> None:
    """The work of each rank; rank 0 prints which samples the ranks have used."""
    dist.init_process_group("gloo", rank=rank.rank, world_size=rank.world_size)
    torch.manual_seed(1)
    if "--no-sampler" in sys.argv:
        loader = DataLoader(DATASET, BATCH, shuffle=True)
    else:
        loader = DataLoader(DATASET, BATCH, sampler=DistributedSampler(DATASET, seed=1))

    first = None
    for epoch in range(EPOCHS):
        if isinstance(loader.sampler, DistributedSampler) and "--no-set-epoch" not in sys.argv:
            loader.sampler.set_epoch(epoch)
        used = torch.cat([indices for _images, _labels, indices in loader])

        # A real training would now do its steps. Here, rank 0 receives what each rank has used.
        everything = [torch.empty_like(used) for _ in range(RANKS)]
        dist.all_gather(everything, used)
        if rank.is_first:
            show(epoch, everything, first if first is not None else used)
        first = used if first is None else first
    dist.destroy_process_group()


def show(epoch: int, used: list[torch.Tensor], first: torch.Tensor) -> None:
    """Prints how often the samples of an epoch were used, and whether their order is new."""
    together = torch.stack([indices[:BATCH] for indices in used]).flatten()
    print(f"epoch {epoch}: {len(used[0]) // BATCH} steps, ", end="")
    print(f"{sum(map(len, used))} samples used, {len(torch.cat(used).unique())} of them different; ", end="")
    print(f"step 0: {len(together.unique())} different of {len(together)}; ", end="")
    print(f"{'the order of epoch 0' if torch.equal(used[0], first) else 'a new order'}")


if __name__ == "__main__":
    # The ranks are forked: this process must not start threads before.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        launch(train, world_size=RANKS, max_restarts=0, logs=Path(folder))
