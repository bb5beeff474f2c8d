"""A job that is queued again with `--resume`: all that changes in a step is in the checkpoint, and restored."""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Job:
    def __init__(self, options):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 1))
        self.ema = copy.deepcopy(self.net).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, options.epochs)
        self.epoch = 0
        if options.resume:
            self.restore(torch.load(options.resume, weights_only=True))

    def parts(self):
        return {"net": self.net, "ema": self.ema, "optimizer": self.optimizer, "schedule": self.schedule}

    def save(self, path):
        state = {name: part.state_dict() for name, part in self.parts().items()}
        torch.save({**state, "epoch": self.epoch}, path + ".part")
        os.replace(path + ".part", path)

    def restore(self, state):
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        self.epoch = state["epoch"]


def train(rank, options):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=options.port)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, x[:, :1] * x[:, 1:2])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    job = Job(options)
    model = DDP(job.net)
    while job.epoch < options.epochs:
        sampler.set_epoch(job.epoch)
        for inputs, targets in loader:
            job.optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            job.optimizer.step()
            with torch.no_grad():
                for average, weight in zip(job.ema.parameters(), job.net.parameters(), strict=True):
                    average.lerp_(weight, 0.05)
        job.schedule.step()
        job.epoch += 1
        if rank == 0:
            job.save("job.ckpt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--port", default="29713")
    parser.add_argument("--resume", metavar="CHECKPOINT", help="continue from this checkpoint")
    mp.spawn(train, args=(parser.parse_args(),), nprocs=2)
