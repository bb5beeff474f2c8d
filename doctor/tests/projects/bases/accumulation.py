"""A training that accumulates the gradients of two micro-batches of texts."""

import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

STEPS = 2


class Texts(Dataset):
    def __init__(self, padded):
        generator = torch.Generator().manual_seed(8)
        self.x = torch.randint(1, 30, (96, 10), generator=generator)
        self.y = self.x.clone()
        if padded:
            lengths = torch.randint(2, 10, (96, 1), generator=generator)
            self.y[torch.arange(10) >= lengths] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 16), nn.Linear(16, 30)

    def forward(self, x, labels):
        logits = self.out(self.embed(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def main():
    dist.init_process_group("gloo")
    data = Texts(padded=False)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    torch.manual_seed(1)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        window = []
        for batch in loader:
            window.append(batch)
            if len(window) < STEPS:
                continue
            for number, part in enumerate(window, 1):
                with contextlib.nullcontext() if number == STEPS else model.no_sync():
                    loss = model(**part)["loss"] / STEPS
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            window = []
    dist.destroy_process_group()
