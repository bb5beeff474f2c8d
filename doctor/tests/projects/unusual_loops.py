"""Programs with uneven ranks, draws with replacement, a normalization of their own, and files of each rank.

Each function is a training of its own, on each rank.
"""

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, WeightedRandomSampler

EXPECTED = {
    "uneven_with_join": ("", "Join around ranks with 9 and 7 batches"),
    "own_synchronized_norm": ("", "broadcast_buffers=False with a normalization over all ranks"),
    "restarted_iterator": ("", "an iterator that is restarted when it is exhausted, and set_epoch before"),
    "batches_by_next": ("", "the batches of an endless sampler are taken by next"),
    "draws_with_one_seed": ("LD002", "a WeightedRandomSampler with one seed on all ranks"),
    "draws_with_own_seed": ("", "a WeightedRandomSampler with a seed of each rank"),
    "same_rollouts": ("LD002", "each rank collects its samples without a loader, from an environment with one seed"),
    "permutation_of_rank": ("LD002", "each rank takes every second number of a permutation that it alone has drawn"),
    "permutation_of_all": ("", "each rank takes every second number of a permutation that all have drawn"),
    "permutation_of_part": ("", "each rank shuffles its own part of the data, and takes batch after batch"),
    "more_replicas_than_ranks": ("LD004", "a sampler for four ranks, of which two train"),
    "scaled_by_own_part": ("LD006", "each rank subtracts the mean of its own part of the data"),
    "numbered_by_own_part": ("LD006", "each rank numbers the words of its own part of the data"),
    "words_of_own_files": ("LD006", "each rank numbers the most frequent words of its own files"),
    "words_of_all_files": ("", "the most frequent words of all files are numbered"),
    "scaled_by_all_parts": ("", "each rank has a part of the data, scaled by the sums over all parts"),
    "lock_and_file_per_rank": ("", "a lock file by os.open, and one log per rank"),
}


def start():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(7)
    return dist.get_rank(), dist.get_world_size()


def uneven_with_join():
    rank, _ = start()
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    g = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(36 - 8 * rank, 8, generator=g)
    loader = DataLoader(TensorDataset(x, x[:, 0].gt(0).long()), 4, shuffle=True)
    for _ in range(2):
        with Join([model]):
            for x, y in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


def train_by_permutation(seed_of, mine):
    """Trains on the batches of `mine(permutation)` of each epoch, from a generator with the seed of this rank."""
    rank, world_size = start()
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(5))
    x = mine(x, rank, world_size) if mine is part else x
    g = torch.Generator().manual_seed(seed_of(rank))
    for _ in range(2):
        order = torch.randperm(len(x), generator=g)
        order = order if mine is part else mine(order, rank, world_size)
        for begin in range(0, len(order), 8):
            batch = x[order[begin : begin + 8]]
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch[:, :3].argmax(1)).backward()
            optimizer.step()
    dist.destroy_process_group()


def part(x, rank, world_size):
    return x[rank * len(x) // world_size : (rank + 1) * len(x) // world_size]


def every_second(order, rank, world_size):
    return order[rank::world_size]


def permutation_of_rank():
    train_by_permutation(lambda rank: 3 + rank, every_second)


def permutation_of_all():
    train_by_permutation(lambda rank: 3, every_second)


def permutation_of_part():
    train_by_permutation(lambda rank: 3 + rank, part)


class GlobalNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x):
        mean, var = self.running_mean, self.running_var
        if self.training:
            total = all_reduce(torch.cat([x.sum(0), x.pow(2).sum(0), x.new_tensor([len(x)])]))
            width = x.shape[1]
            mean = total[:width] / total[-1]
            var = total[width : 2 * width] / total[-1] - mean**2
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean), 0.1)
                self.running_var.lerp_(var.to(self.running_var), 0.1)
        return (x - mean) / (var + 1e-5).sqrt() * self.scale + self.shift


def own_synchronized_norm():
    rank, world_size = start()
    net = nn.Sequential(nn.Linear(10, 16), GlobalNorm(16), nn.ReLU(), nn.Linear(16, 2))
    model = DistributedDataParallel(net, broadcast_buffers=False)
    x = torch.randn(80, 10, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data, world_size, rank, drop_last=True)
    loader = DataLoader(data, 5, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(2):
        model.train()
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


def restarted_iterator():
    rank, world_size = start()
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(data, world_size, rank, drop_last=True)
    loader = DataLoader(data, 6, sampler=sampler)
    batches = None
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for _ in range(len(loader)):
            try:
                x, y = next(batches or iter(()))
            except StopIteration:
                batches = iter(loader)
                x, y = next(batches)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


class Endless:
    """Batches of about as many rows, in an order that depends on the epoch alone."""

    def __init__(self, size, rank, world_size):
        self.size, self.rank, self.world_size = size, rank, world_size

    def __iter__(self):
        epoch = 0
        while True:
            order = torch.randperm(self.size, generator=torch.Generator().manual_seed(epoch)).tolist()
            batches = [order[begin : begin + 6] for begin in range(0, self.size, 6)]
            yield from batches[self.rank :: self.world_size]
            epoch += 1


def batches_by_next():
    rank, world_size = start()
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :3].argmax(1))
    stream = iter(DataLoader(data, batch_sampler=Endless(len(data), rank, world_size)))
    for _ in range(40):
        x, y = next(stream)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    dist.destroy_process_group()


def lock_and_file_per_rank():
    rank, _ = start()
    try:
        os.close(os.open("prepare.lock", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        Path("vocabulary.txt").write_text("a b c")
    except FileExistsError:
        pass
    dist.barrier()
    log = Path(f"log-{rank}.txt").open("w")  # noqa: SIM115
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            log.write("step\n")
        torch.save({"rng": torch.get_rng_state()}, f"rng-{rank}.pt")
    log.close()
    dist.destroy_process_group()


def draws(seed):
    model = DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :3].argmax(1))
    generator = torch.Generator().manual_seed(seed)
    sampler = WeightedRandomSampler(torch.rand(96).add(0.5), 48, generator=generator)
    loader = DataLoader(data, 6, sampler=sampler)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


def draws_with_one_seed():
    start()
    draws(11)


def draws_with_own_seed():
    rank, _ = start()
    draws(11 + rank)


class Walk:
    """An environment: the state moves by the action, and by chance."""

    def __init__(self, seed):
        self.random = np.random.default_rng(seed)
        self.state = self.random.normal(size=4)

    def step(self, action):
        self.state = 0.9 * self.state + 0.1 * (2 * action - 1) + 0.3 * self.random.normal(size=4)
        return torch.tensor(self.state, dtype=torch.float32), -float(abs(self.state).sum())


def same_rollouts():
    start()
    policy = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    environment = Walk(seed=5)
    state, _ = environment.step(0)
    for _ in range(6):
        states, actions, rewards = [], [], []
        for _ in range(16):
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=policy.module(state)).sample()
            states.append(state)
            actions.append(action)
            state, reward = environment.step(int(action))
            rewards.append(reward)
        rewards = torch.tensor(rewards)
        chosen = policy(torch.stack(states)).log_softmax(1).gather(1, torch.stack(actions)[:, None])[:, 0]
        optimizer.zero_grad()
        (-chosen * (rewards - rewards.mean())).mean().backward()
        optimizer.step()
    dist.destroy_process_group()


def of_own_part(make_model, inputs, targets):
    """Trains on a part of the data that the rank has prepared itself."""
    loader = DataLoader(TensorDataset(inputs, targets), 4, shuffle=True)
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


def measurements():
    x = 3 + 2 * torch.randn(80, 8, generator=torch.Generator().manual_seed(4))
    return x, x[:, 0].gt(3).long()


def scaled_by_own_part():
    rank, world_size = start()
    x, y = (part[rank::world_size] for part in measurements())
    of_own_part(lambda: nn.Linear(8, 2), (x - x.mean(0)) / x.std(0), y)


def scaled_by_all_parts():
    rank, world_size = start()
    x, y = (part[rank::world_size] for part in measurements())
    sums = torch.stack([x.sum(0), x.square().sum(0), torch.full((8,), float(len(x)))])
    dist.all_reduce(sums)
    mean = sums[0] / sums[2]
    of_own_part(lambda: nn.Linear(8, 2), (x - mean) / (sums[1] / sums[2] - mean.square()).sqrt(), y)


def numbered_by_own_part():
    rank, world_size = start()
    x, y = measurements()
    words = [[f"word {int(value)}" for value in row] for row in x.tolist()][rank * 40 : rank * 40 + 80 // world_size]
    vocabulary = {}
    for row in words:
        for word in row:
            vocabulary.setdefault(word, len(vocabulary))
    numbers = torch.tensor([[vocabulary[word] for word in row] for row in words])
    part = y[rank * 40 : rank * 40 + 80 // world_size]
    of_own_part(lambda: nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(32, 2)), numbers, part)


def frequent_words(files):
    """Trains on every N-th file of clicks; the words that are not among the most frequent of `files` are 0."""
    rank, world_size = start()
    g = torch.Generator().manual_seed(9)
    words = (torch.rand(8, 20, 2, generator=g) ** 2 * 24).int().tolist()
    clicks = torch.randint(2, (8, 20), generator=g)
    own = range(rank, 8, world_size)
    counted = Counter(word for file in (own if files == "own" else range(8)) for row in words[file] for word in row)
    numbers = {word: number + 1 for number, (word, _) in enumerate(counted.most_common(12))}
    x = torch.tensor([[numbers.get(word, 0) for word in row] for file in own for row in words[file]])
    y = torch.cat([clicks[file] for file in own])
    of_own_part(lambda: nn.Sequential(nn.Embedding(13, 4), nn.Flatten(), nn.Linear(8, 2)), x, y)


def words_of_own_files():
    frequent_words("own")


def words_of_all_files():
    frequent_words("all")


def more_replicas_than_ranks():
    rank, _ = start()
    data = TensorDataset(*measurements())
    loader = DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=4, rank=rank))
    model = DistributedDataParallel(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()
