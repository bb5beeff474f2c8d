"""Errors of TrainCheck's list (OSDI 2025; OrderLab/TrainCheck) that CPUs can express, one function each.

Three are written as they were reported, three let a communication hook return wrong values as TrainCheck's own scripts
do, and five are analogues with the same symptom. Each is a training of its own, on each rank.
"""

import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EXPECTED = {
    "x_jxmnop_ddp_out_of_sync": "LD009",
    "pytorch_forum_84911": "LD019",
    "stackoverflow_60335387": "LD020",
    "pytorch_84803": "LD033",
    "pytorch_96600": "LD033",
    "baichuan2_86": "LD033",
    "deepspeed_1801": "LD011",
    "pytorch_104336": "LD010",
    "transformers_33844": "LD022",
    "stackoverflow_67180955": "LD007",
    "deepspeed_5794": "LD027",
}


def setup():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    return rank, world_size


def make_loader(rank, world_size, size=96):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 16, generator=generator)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(dataset, world_size, rank)
    return DataLoader(dataset, batch_size=8, sampler=sampler), sampler


def make_net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def train(model, optimizer, *, clear=True, after_backward=None, wrong_mode=False):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    loader, sampler = make_loader(rank, world_size)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            if clear:
                optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if after_backward:
                after_backward()
            optimizer.step()
        if wrong_mode:
            validation = DataLoader(loader.dataset, batch_size=32)
            with torch.no_grad():
                for x, _ in validation:
                    model.module(x)
    dist.destroy_process_group()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def x_jxmnop_ddp_out_of_sync():
    """The ranks begin with different weights, and only the gradients are averaged."""
    rank, world_size = setup()
    torch.manual_seed(rank)
    model = make_net()

    def average():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size

    train(model, sgd(model), after_backward=average)


def pytorch_forum_84911():
    """The optimizer was created from another copy of the model's last layer."""
    setup()
    torch.manual_seed(0)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.module[0].parameters(), lr=0.05)

    def clear():
        for parameter in model.module[2].parameters():
            parameter.grad = None

    train(model, optimizer, after_backward=clear)


def stackoverflow_60335387():
    """zero_grad is missing."""
    setup()
    torch.manual_seed(0)
    model = DDP(make_net())
    train(model, sgd(model), clear=False)


def _with_hook(change):
    """Trains with a hook that changes the averaged gradients."""
    _, world_size = setup()
    torch.manual_seed(0)
    model = DDP(make_net())
    calls = [0]

    def hook(state, bucket):
        calls[0] += 1
        future = dist.all_reduce(bucket.buffer() / world_size, async_op=True).get_future()
        return future.then(lambda done: change(done.value()[0], calls[0]))

    if world_size > 1:
        model.register_comm_hook(None, hook)
    train(model, sgd(model))


def pytorch_84803():
    """The all-reduce of one rank returns zeros, once."""
    _with_hook(lambda gradient, call: gradient.zero_() if call == 2 and dist.get_rank() == 1 else gradient)


def pytorch_96600():
    """The all-reduces of all ranks return zeros, once."""
    _with_hook(lambda gradient, call: gradient.zero_() if call == 2 else gradient)


def baichuan2_86():
    """A part of what one rank receives is lost."""

    def lose(gradient, call):
        if call == 1 and dist.get_rank() == 0:
            gradient[: len(gradient) // 2] = 0
        return gradient

    _with_hook(lose)


def deepspeed_1801():
    """The gradients of the layer that all ranks have are clipped on one rank (BLOOM-176B)."""
    rank, _ = setup()
    torch.manual_seed(0)
    model = DDP(make_net())

    def clip():
        if rank == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    train(model, sgd(model), after_backward=clip)


def pytorch_104336():
    """The parameters are replaced after the wrap, as a move to another dtype or device does."""
    setup()
    torch.manual_seed(0)
    model = DDP(make_net(), find_unused_parameters=True)
    model.module[2] = nn.Linear(32, 4)
    train(model, sgd(model))


def transformers_33844():
    """Dropout is active in evaluation."""
    setup()
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4)))
    torch.manual_seed(dist.get_rank())
    train(model, sgd(model), wrong_mode=True)


class NoisyPoints(Dataset):
    """Adds NumPy's noise to each sample."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        x = torch.randn(16, generator=torch.Generator().manual_seed(index))
        noise = torch.from_numpy(np.random.standard_normal(16)).float()
        return x + 0.1 * noise, int(x[:4].argmax())


def stackoverflow_67180955():
    """NumPy's generator is the same in each worker, as in torch 1.8, which did not seed it."""
    rank, world_size = setup()
    torch.manual_seed(rank)
    model = DDP(make_net())
    dataset, optimizer = NoisyPoints(), sgd(model)
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=2, worker_init_fn=lambda worker: np.random.seed(0))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


class Routed(nn.Module):
    """Exchanges the load of the experts once per sample that this rank sends to the second one."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 2)
        self.net = make_net()

    def forward(self, x):
        expert = self.router(x).argmax(1)
        for _ in range(int((expert == 1).sum())):
            load = torch.bincount(expert, minlength=2)
            dist.all_reduce(load)
        return self.net(x) + self.router(x).mean(1, keepdim=True)


def deepspeed_5794():
    """The number of exchanges between experts depends on the samples of each rank: training hangs."""
    setup()
    torch.manual_seed(0)
    model = DDP(Routed())
    train(model, sgd(model))
