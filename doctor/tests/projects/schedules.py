"""Programs with a learning rate that changes, in plain loops and with schedules of torch.

Each function is a training of its own, on each rank.
"""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECTED = {
    "per_process_each_step": ("LD017", "fault", "a schedule of the loader's length steps once per process"),
    "per_process_each_epoch": ("LD017", "fault", "a schedule per epoch steps once per process"),
    "decay_per_process": ("LD017", "fault", "a warm-up of fixed steps hides that the decay steps once per process"),
    "by_hand_per_process": ("LD017", "fault", "a cosine by hand that counts the steps of all processes"),
    "scaled_twice": ("LD017", "fault", "a learning rate times the number of ranks and times the global batch"),
    "by_hand": ("", "", "a cosine by hand over the loader's length"),
    "warmup_then_cosine": ("", "", "a warm-up of fixed steps, then a cosine over the loader's length"),
    "decay_of_all": ("", "", "the same with the length of the undivided loader"),
    "per_epoch": ("", "", "a schedule per epoch"),
    "scaled_with_ranks": ("", "", "a learning rate times the number of ranks, with a schedule per step"),
}


def train(make=None, by_hand=None, after_step=None, after_epoch=None, rate=lambda: 0.1):
    dist.init_process_group("gloo")
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))
    torch.manual_seed(1)
    model = DDP(nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), rate())
    schedule = make(optimizer, 2 * len(loader)) if make else None
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if by_hand:
                for group in optimizer.param_groups:
                    group["lr"] = 0.1 * by_hand(epoch * len(loader) + number, 2 * len(loader))
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if after_step:
                after_step(schedule)
        if after_epoch:
            after_epoch(schedule)
    dist.destroy_process_group()


def cosine(step, total):
    return 0.5 * (1 + math.cos(math.pi * min(step / total, 1)))


def step_once(schedule):
    schedule.step()


def step_per_process(schedule):
    for _ in range(dist.get_world_size()):
        schedule.step()


def per_process_each_step():
    train(lr_scheduler.CosineAnnealingLR, after_step=step_per_process)


def per_process_each_epoch():
    train(lambda optimizer, total: lr_scheduler.StepLR(optimizer, 1, 0.5), after_epoch=step_per_process)


def warm_up_and_decay(optimizer, total, warm=6):
    def factor(step):
        return (step + 1) / warm if step < warm else max(0.0, (total - step) / (total - warm))

    return lr_scheduler.LambdaLR(optimizer, factor)


def decay_per_process():
    train(warm_up_and_decay, after_step=step_per_process)


def decay_of_all():
    train(
        lambda optimizer, total: warm_up_and_decay(optimizer, total * dist.get_world_size()),
        after_step=step_per_process,
    )


def by_hand_per_process():
    train(by_hand=lambda step, total: cosine(step * dist.get_world_size(), total))


def by_hand():
    train(by_hand=cosine)


def warmup_then_cosine():
    def make(optimizer, total):
        warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, total)], [2])

    train(make, after_step=step_once)


def per_epoch():
    train(lambda optimizer, total: lr_scheduler.StepLR(optimizer, 1, 0.5), after_epoch=step_once)


def scaled_twice():
    def rate():
        global_batch = 8 * dist.get_world_size()
        return 0.1 * dist.get_world_size() * global_batch / 32

    train(rate=rate)


def scaled_with_ranks():
    def make(optimizer, total):
        return lr_scheduler.OneCycleLR(optimizer, 0.2 * dist.get_world_size(), total)

    train(make, after_step=step_once)
