"""torchrun --nproc_per_node=2 sliced_by_rank.py: tensors sliced by rank, a loss made of operators."""

import torch
import torch.distributed as dist
from model import scaled
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    inputs = torch.rand(160, 6, generator=g)
    targets = inputs.sum(1, keepdim=True).sin()
    local_batch = 10
    torch.manual_seed(0)
    net = DDP(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(5):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, 160, local_batch * world):
            mine = order[start + rank * local_batch : start + (rank + 1) * local_batch]
            x, y = inputs[mine], targets[mine]
            loss = scaled(((net(x) - y) ** 2).mean(), world)
            opt.zero_grad()
            loss.backward()
            opt.step()
    dist.destroy_process_group()


main()
