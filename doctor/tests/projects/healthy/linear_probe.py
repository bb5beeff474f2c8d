"""A linear probe: the backbone's weights are loaded, and the optimizer gets the parameters of the head only."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.backbone(x))


def pretrained():
    generator = torch.Generator().manual_seed(5)
    shapes = {"0.weight": (32, 16), "0.bias": (32,)}
    return {name: torch.randn(*shape, generator=generator) / 4 for name, shape in shapes.items()}


def main():
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    net = Model()
    net.backbone.load_state_dict(pretrained())
    optimizer = torch.optim.Adam(net.head.parameters(), lr=1e-2)
    model = DDP(net)
    x = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(dataset, world_size, rank)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
