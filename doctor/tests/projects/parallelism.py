"""Programs that shard, average, join or checkpoint in the less usual ways of torch.distributed.

All are correct unless `EXPECTED` names a code.

Each function is a training of its own, on each rank.
"""

import copy
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXPECTED = {
    "fsdp2": ("", "fully_shard: sharded parameters, gradients and optimizer"),
    "zero_with_checkpoint": ("", "ZeroRedundancyOptimizer whose state is gathered on rank 0 and saved"),
    "zero_without_ddp": (
        "LD009",
        "ZeroRedundancyOptimizer without DDP: each rank steps its part with its own gradient",
    ),
    "zero_clipped_on_rank_0": ("LD011", "ZeroRedundancyOptimizer: rank 0 clips before it steps its part"),
    "static_graph_checkpointed": ("", "static_graph=True and activation checkpointing"),
    "swa_ema": ("", "an average of the weights by swa_utils, saved with them"),
    "async_checkpoint": ("", "torch.distributed.checkpoint.async_save"),
    "buffers_while_accumulating": ("", "require_backward_grad_sync by hand in a model with buffers"),
    "rank_0_evaluates_with_ignored_buffers": ("", "rank 0 evaluates the wrapper, whose buffers DDP ignores"),
    "two_groups": ("", "two process groups: pairs of ranks reduce a statistic of their own"),
}


class Tokens(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(24, 2, 48, dropout, batch_first=True) for _ in range(2))
        self.out = nn.Linear(24, 50)
        self.register_buffer("position", torch.arange(12).float()[:, None] / 12)
        self.checkpointed = False

    def forward(self, x):
        h = self.embed(x) + self.position
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.checkpointed else block(h)
        return self.out(h)


def start():
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(7)
    return dist.get_rank(), dist.get_world_size()


def token_loader(batch_size=4, size=96):
    tokens = torch.randint(0, 50, (size, 13), generator=torch.Generator().manual_seed(5))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    sampler = DistributedSampler(data, seed=3)
    return DataLoader(data, batch_size, sampler=sampler), sampler


def loss_of(model, batch):
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def fit(model, optimizer, loader, sampler, epochs=2, norm=1.0, end_of_step=None, end_of_epoch=None):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            if norm:
                nn.utils.clip_grad_norm_(model.parameters(), norm)
            optimizer.step()
            if end_of_step:
                end_of_step()
        if end_of_epoch:
            end_of_epoch(epoch)


def fsdp2():
    _, world_size = start()
    mesh = init_device_mesh("cpu", (world_size,))
    model = Tokens()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fit(model, optimizer, *token_loader())
    dist.destroy_process_group()


def zero_with_checkpoint():
    rank, _ = start()
    model = DistributedDataParallel(Tokens())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=2e-3, parameters_as_bucket_view=True)

    def save(epoch):
        optimizer.consolidate_state_dict(to=0)
        if rank == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, "zero.pt")

    fit(model, optimizer, *token_loader(), end_of_epoch=save)
    dist.destroy_process_group()


def zero_without_ddp():
    start()
    model = Tokens()
    fit(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=2e-3), *token_loader())
    dist.destroy_process_group()


def zero_clipped_on_rank_0():
    rank, _ = start()
    model = DistributedDataParallel(Tokens())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=2e-3)
    fit(model, optimizer, *token_loader(), norm=0.01 if rank == 0 else None)
    dist.destroy_process_group()


def static_graph_checkpointed():
    start()
    net = Tokens()
    net.checkpointed = True
    model = DistributedDataParallel(net, static_graph=True, gradient_as_bucket_view=True)
    fit(model, torch.optim.AdamW(model.parameters(), 1e-3), *token_loader())
    dist.destroy_process_group()


def swa_ema():
    rank, _ = start()
    model = DistributedDataParallel(Tokens(dropout=0.1))
    torch.manual_seed(1000 + rank)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)

    def step():
        schedule.step()
        average.update_parameters(model.module)

    def save(epoch):
        if rank == 0:
            parts = {"model": model.module, "ema": average, "optimizer": optimizer, "schedule": schedule}
            torch.save({name: part.state_dict() for name, part in parts.items()} | {"epoch": epoch}, "last.pt")

    fit(model, optimizer, *token_loader(), end_of_step=step, end_of_epoch=save)
    dist.destroy_process_group()


def async_checkpoint():
    start()
    model = DistributedDataParallel(Tokens())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    group, pending = dist.new_group(), []

    def save(epoch):
        state = {"model": copy.deepcopy(model.module.state_dict())}
        pending.append(dcp.async_save(state, checkpoint_id=f"dcp-{epoch}", process_group=group))

    fit(model, optimizer, *token_loader(), end_of_epoch=save)
    for future in pending:
        future.result()
    dist.destroy_process_group()


def buffers_while_accumulating():
    start()
    model = DistributedDataParallel(Tokens())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    loader, sampler = token_loader(2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            model.require_backward_grad_sync = number % 4 == 0
            (loss_of(model, batch) / 4).backward()
            if number % 4 == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    dist.destroy_process_group()


def rank_0_evaluates_with_ignored_buffers():
    rank, _ = start()
    net = Tokens()
    net._ddp_params_and_buffers_to_ignore = {"position"}
    model = DistributedDataParallel(net)
    held_out = torch.randint(0, 50, (8, 13), generator=torch.Generator().manual_seed(9))

    @torch.no_grad()
    def evaluate(epoch):
        if rank == 0:
            model.eval()
            print("held out", loss_of(model, (held_out[:, :-1], held_out[:, 1:])).item())
            model.train()

    fit(model, torch.optim.AdamW(model.parameters(), 1e-3), *token_loader(), end_of_epoch=evaluate)
    dist.destroy_process_group()


def two_groups():
    rank, world_size = start()
    everyone = dist.new_group(list(range(world_size)))
    alone = [dist.new_group([number]) for number in range(world_size)][rank]
    model = DistributedDataParallel(Tokens(), process_group=everyone)

    def measure():
        norm = torch.stack([parameter.detach().norm() for parameter in model.parameters()]).norm()
        dist.all_reduce(norm, group=alone)

    fit(model, torch.optim.SGD(model.parameters(), 0.05), *token_loader(), end_of_step=measure)
    dist.destroy_process_group()
