"""Programs that do what an examination must survive."""

import os
import shutil
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def train(rank, world_size, model, before_step=lambda step: None, counts=False):
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    generator = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 16, generator=generator), torch.randint(0, 4, (64,), generator=generator))
    sampler = DistributedSampler(dataset, world_size, rank)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for epoch in range(3 if counts else 2):
        sampler.set_epoch(epoch)
        for step, (x, y) in enumerate(DataLoader(dataset, 4 if counts else 8, sampler=sampler)):
            before_step(step)
            optimizer.zero_grad()
            F.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        assert not counts or step == 7, f"{step + 1} batches in epoch {epoch}"
    dist.destroy_process_group()


def hangs(rank, world_size):
    def wait(step):
        if rank == 1 and step == 1:
            time.sleep(1000)

    train(rank, world_size, nn.Linear(16, 4), wait)


def hangs_alone(rank, world_size):
    time.sleep(1000)


class Undetermined(nn.Linear):
    def forward(self, x):
        return super().forward(x * (1 + int.from_bytes(os.urandom(2), "big") / 1e5))


def is_not_deterministic(rank, world_size):
    train(rank, world_size, Undetermined(16, 4))


class Single(nn.Linear):
    def forward(self, x):
        if x.dtype != torch.float32:
            raise TypeError("only float32")
        return super().forward(x)


def has_no_64_bits(rank, world_size):
    train(rank, world_size, Single(16, 4, dtype=torch.float32))


def exits(rank, world_size):
    train(rank, world_size, nn.Linear(16, 4), lambda step: sys.exit(3) if step == 2 else None)


def dies(rank, world_size):
    train(rank, world_size, nn.Linear(16, 4), lambda step: os._exit(9) if rank == 1 and step == 1 else None)


def fails_on_rank_1(rank, world_size):
    if rank == 1:
        raise ValueError("no data for rank 1")
    train(rank, world_size, nn.Linear(16, 4))


def starts_processes(rank, world_size):
    subprocess.Popen(["sleep", "4567"])
    subprocess.Popen(["sleep", "4567"], start_new_session=True)
    train(rank, world_size, nn.Linear(16, 4))


def saves(rank, world_size):
    model = nn.Linear(16, 4)
    assert not os.path.exists("new"), "an earlier run's"
    train(rank, world_size, model)
    if rank == 0:
        torch.save(model.state_dict(), "model.pt")
        with open("model.pt.tmp", "wb") as file:
            file.write(b"new")
        os.replace("model.pt.tmp", "best.pt")
        os.remove("mine.txt")
        shutil.rmtree("old")
        subprocess.run(["cp", "best.pt", "new"], check=False)
        assert torch.load("model.pt").keys() == {"weight", "bias"}
        assert sorted(os.listdir()) == ["best.pt", "model.pt", "new"], os.listdir()
        time.sleep(float(os.environ.get("WAIT", "0")))


def counts_its_samples(rank, world_size):
    """Expects that each epoch has all batches of its loader, as programs do that check themselves."""
    train(rank, world_size, nn.Linear(16, 4), counts=True)


def does_nothing(rank, world_size):
    pass


def takes_three(a, b, c):
    pass
