"""Questions about samples and random numbers.

python -m examples.tutorial.asked.samples counted|resumed|epochs|noise
"""

from __future__ import annotations

import sys

import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from examples.tutorial.asked.ranks import on_two_ranks
from lit_mnist.plugins import ExactDistributedSampler


def counted() -> None:
    """How many of 10,000 samples do three ranks evaluate?"""
    samples, ranks = range(10_000), range(3)
    padded = [DistributedSampler(samples, 3, rank, shuffle=False) for rank in ranks]
    print("DistributedSampler:", sum(len(list(sampler)) for sampler in padded))
    batches = BatchSampler(samples, batch_size=64, drop_last=False)
    shards = [BatchSamplerShard(batches, num_processes=3, process_index=rank) for rank in ranks]
    print("a loader that Accelerate has prepared:", sum(len(batch) for shard in shards for batch in shard))
    exact = [ExactDistributedSampler(samples, 64, rank=rank, world_size=3, evaluation=True) for rank in ranks]
    print("ExactDistributedSampler:", sum(len(batch) for sampler in exact for batch in sampler))


def resumed() -> None:
    """Which samples does an epoch of ten batches use that is interrupted after three?"""

    def plain() -> DataLoader[int]:
        order = RandomSampler(range(640), generator=torch.Generator().manual_seed(1))
        return DataLoader(range(640), batch_size=64, sampler=order)

    used = torch.zeros(640, dtype=torch.int64)
    for count in (3, 7):
        for _, batch in zip(range(count), plain(), strict=False):
            used[batch] += 1
    print(f"a new loader: {int((used == 2).sum())} samples twice, {int((used == 0).sum())} never")

    used.zero_()
    sampler = ExactDistributedSampler(640, 64, seed=1, rank=0, world_size=1)
    for _, batch in zip(range(3), sampler, strict=False):
        used[batch] += 1
    again = ExactDistributedSampler(640, 64, seed=1, rank=0, world_size=1)
    again.load_state_dict(sampler.state_dict(3))
    for batch in again:
        used[batch] += 1
    print(f"a sampler with its position: {int((used == 2).sum())} samples twice, {int((used == 0).sum())} never")


def epochs() -> None:
    """Does the second epoch have the order of the first?"""
    sampler = DistributedSampler(range(1000), num_replicas=2, rank=0)
    first = list(sampler)
    print("without set_epoch, the same order:", list(sampler) == first)
    sampler.set_epoch(1)
    print("with set_epoch, the same order:", list(sampler) == first)


def noise() -> None:
    """Which random numbers do two ranks draw?"""

    def draw(seed: int) -> str:
        torch.manual_seed(seed)
        return " ".join(f"{number:.4f}" for number in torch.rand(3).tolist())

    on_two_ranks("one seed", lambda _: draw(1))
    on_two_ranks("a seed per rank", lambda rank: draw(1 + rank))


if __name__ == "__main__":
    {"counted": counted, "resumed": resumed, "epochs": epochs, "noise": noise}[sys.argv[1]]()
