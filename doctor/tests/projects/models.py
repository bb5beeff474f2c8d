"""Programs with several models, with streams, and with batch norm; all are correct unless `EXPECTED` names a code.

Each function is a training of its own, on each rank.
"""

import copy
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

DEPENDS = "depends on the number of devices"
EXPECTED = {
    "frozen_backbone_updates": ("LD035", "fault", "the batch norm of a frozen backbone is left in training mode"),
    "small_batch_norm": ("LD012", DEPENDS, "a net of 30 parameters with a batch norm"),
    "stream_without_shards": ("LD003", "fault", "each rank reads all shards of an endless stream"),
    "shards_of_worker_plus_rank": (
        "LD003",
        "fault",
        "the second worker of one rank reads the shards of the other's first",
    ),
    "target_of_each_rank": (
        "LD036",
        "fault",
        "a target is copied before the wrap, from weights of the rank's own seed",
    ),
    "target_of_the_wrapped": ("", "", "a target is copied after the wrap, which made the weights equal"),
    "teacher_of_rank_0": ("", "", "rank 0 trains a teacher while the others wait, and all distil it"),
    "student_of_rank_0_teacher": ("LD009", "fault", "the same, with a student that is not wrapped"),
    "evaluates_before_the_first_step": ("LD021", "fault", "an evaluation before the first step undoes train()"),
    "dropout_on_joined_batches": ("", "", "a discriminator with dropout gets true and made samples in one batch"),
    "frozen_backbone_in_eval": ("", "", "a frozen backbone with batch norm in evaluation mode"),
    "momentum_encoder": ("", "", "an encoder that follows the trained one, with batch norm in training mode"),
    "distillation": ("", "", "a student that learns from a teacher, each with a wrapper"),
    "actor_and_learner": ("", "", "a policy and a value network with own optimizers, on sampled actions"),
    "endless_shards": ("", "", "an endless stream of shards, split over ranks and workers, with a shuffle buffer"),
    "random_depth": ("", "", "a net that skips blocks at random, with a seed per rank"),
    "discriminator_frozen_for_a_while": ("", "", "a GAN that freezes a discriminator with layer norm in turns"),
}


def start(seed=1):
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def loader(size=96, batch=8):
    x = torch.randn(size, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x[:, :4].argmax(1))
    return DataLoader(data, batch, sampler=DistributedSampler(data))


def classify(model, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def epochs(batches, step, number=2, begin=None):
    for epoch in range(number):
        if begin:
            begin()
        if isinstance(batches.sampler, DistributedSampler):
            batches.sampler.set_epoch(epoch)
        for count, batch in enumerate(batches):
            step(*batch)
            if count == 5:
                break
    dist.destroy_process_group()


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def _with_backbone(in_eval):
    start()
    net = Backbone()
    model = DDP(net, broadcast_buffers=not in_eval)
    optimizer = torch.optim.SGD(net.head.parameters(), 0.1)

    def begin():
        model.train()
        if in_eval:
            net.backbone.eval()

    epochs(loader(), classify(model, optimizer), begin=begin)


def frozen_backbone_updates():
    _with_backbone(False)


def frozen_backbone_in_eval():
    _with_backbone(True)


def small_batch_norm():
    start()
    model = DDP(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    epochs(loader(batch=4), classify(model, optimizer))


def momentum_encoder():
    rank, _ = start()

    def encoder():
        return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))

    query, key = DDP(encoder()), encoder().requires_grad_(False)
    key.load_state_dict(query.module.state_dict())
    optimizer = torch.optim.SGD(query.parameters(), 0.05)
    torch.manual_seed(50 + rank)

    def step(x, _):
        with torch.no_grad():
            for old, new in zip(key.parameters(), query.module.parameters(), strict=True):
                old.lerp_(new, 0.05)
            target = F.normalize(key(x + 0.1 * torch.randn_like(x)), dim=1)
        optimizer.zero_grad()
        (-(F.normalize(query(x), dim=1) * target).sum(1).mean()).backward()
        optimizer.step()

    epochs(loader(), step)


def distillation():
    start()
    teacher, student = DDP(nn.Linear(8, 4)), DDP(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)))
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (teacher, student)]

    def step(x, y):
        logits = teacher(x)
        optimizers[0].zero_grad()
        F.cross_entropy(logits, y).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        F.kl_div(student(x).log_softmax(1), logits.detach().softmax(1), reduction="batchmean").backward()
        optimizers[1].step()

    epochs(loader(), step)


def actor_and_learner():
    rank, _ = start()
    policy, value = DDP(nn.Linear(8, 4)), DDP(nn.Linear(8, 1))
    optimizers = [torch.optim.Adam(model.parameters(), 0.01) for model in (policy, value)]
    torch.manual_seed(20 + rank)

    def step(x, y):
        distribution = torch.distributions.Categorical(logits=policy(x))
        action = distribution.sample()
        reward = (action == y).float()
        estimate = value(x)[:, 0]
        for optimizer, loss in zip(
            optimizers,
            (-(distribution.log_prob(action) * (reward - estimate.detach())).mean(), F.mse_loss(estimate, reward)),
            strict=True,
        ):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    epochs(loader(), step)


class Shards(IterableDataset):
    def __init__(self, divided):
        self.divided = divided

    def __iter__(self):
        worker = get_worker_info()
        part, parts = (worker.id, worker.num_workers) if worker else (0, 1)
        rank, world = (dist.get_rank(), dist.get_world_size()) if self.divided else (0, 1)
        order = random.Random(rank * parts + part)
        buffer = []
        while True:
            for shard in range(rank * parts + part, 16, world * parts):
                buffer += list(torch.randn(12, 9, generator=torch.Generator().manual_seed(shard)))
                order.shuffle(buffer)
                while len(buffer) > 6:
                    row = buffer.pop()
                    yield row[:8], int(row[8] > 0)


def _from_shards(divided):
    start()
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    epochs(DataLoader(Shards(divided), 8), classify(model, optimizer), number=1)


def endless_shards():
    _from_shards(True)


def stream_without_shards():
    _from_shards(False)


class WrongShards(Shards):
    def __iter__(self):
        part = get_worker_info().id + dist.get_rank()
        for shard in range(part, 16, 4):
            for row in torch.randn(12, 9, generator=torch.Generator().manual_seed(shard)):
                yield row[:8], int(row[8] > 0)


def shards_of_worker_plus_rank():
    start()
    model = DDP(nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    epochs(DataLoader(WrongShards(True), 8, num_workers=2), classify(model, optimizer))


def _with_target(before_wrap):
    rank, _ = start(seed=1 + dist_rank())
    online = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 6))
    target = copy.deepcopy(online)
    model = DDP(online)
    if not before_wrap:
        target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), 0.01)
    torch.manual_seed(50 + rank)

    def step(x, _):
        with torch.no_grad():
            wanted = target(x + 0.1 * torch.randn_like(x))
        optimizer.zero_grad()
        F.mse_loss(model(x + 0.1 * torch.randn_like(x)), wanted).backward()
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(target.parameters(), online.parameters(), strict=True):
                a.lerp_(b, 0.05)

    epochs(loader(), step)


def dist_rank():
    return int(os.environ["RANK"])


def target_of_each_rank():
    _with_target(before_wrap=True)


def target_of_the_wrapped():
    _with_target(before_wrap=False)


def _with_teacher(wrap):
    rank, _ = start()
    teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
    if rank == 0:
        optimizer = torch.optim.SGD(teacher.parameters(), 0.1)
        for _ in range(3):
            for x, y in DataLoader(loader().dataset, 16, shuffle=True):
                classify(teacher, optimizer)(x, y)
    dist.barrier()
    for tensor in teacher.state_dict().values():
        dist.broadcast(tensor, 0)
    student = nn.Linear(8, 4)
    model = DDP(student) if wrap else student
    optimizer = torch.optim.Adam(student.parameters(), 0.01)

    def step(x, _):
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        optimizer.zero_grad()
        F.cross_entropy(model(x), wanted).backward()
        optimizer.step()

    epochs(loader(), step)


def teacher_of_rank_0():
    _with_teacher(True)


def student_of_rank_0_teacher():
    _with_teacher(False)


class RandomDepth(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        for block in self.blocks:
            keep = 1.0 if not self.training or torch.rand(()) < 0.8 else 0.0
            x = x + keep * torch.tanh(block(x))
        return self.out(x)


def random_depth():
    rank, _ = start()
    model = DDP(RandomDepth())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(9 + rank)

    epochs(loader(), classify(model, optimizer))


def discriminator_frozen_for_a_while():
    rank, _ = start()
    judge = DDP(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 1)))
    maker = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizers = [torch.optim.Adam(model.parameters(), 0.002, betas=(0.5, 0.9)) for model in (judge, maker)]
    torch.manual_seed(77 + rank)

    def step(x, _):
        made = maker(torch.randn(len(x), 4))
        optimizers[0].zero_grad()
        (F.softplus(-judge(x)) + F.softplus(judge.module(made.detach()))).mean().backward()
        optimizers[0].step()
        judge.requires_grad_(False)
        optimizers[1].zero_grad()
        F.softplus(-judge.module(made)).mean().backward()
        optimizers[1].step()
        judge.requires_grad_(True)

    epochs(loader(), step)


def dropout_on_joined_batches():
    rank, _ = start()
    judge = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(judge.parameters(), 0.002)
    torch.manual_seed(77 + rank)

    def step(x, _):
        scores = judge(torch.cat([x, torch.randn(len(x), 8)])).squeeze(1)
        optimizer.zero_grad()
        (F.softplus(-scores[: len(x)]) + F.softplus(scores[len(x) :])).mean().backward()
        optimizer.step()

    epochs(loader(), step)


def evaluates_before_the_first_step():
    start()
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    train, held, steps = classify(model, optimizer), loader(32), []

    @torch.no_grad()
    def evaluate():
        model.eval()
        return sum(F.cross_entropy(model(x), y).item() for x, y in held)

    def step(x, y):
        if len(steps) % 100 == 0:
            evaluate()
        steps.append(1)
        train(x, y)

    model.train()
    epochs(loader(), step)
