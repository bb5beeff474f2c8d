"""Programs that update a codebook or a queue; all are correct unless `EXPECTED` names a code.

Each function is a training of its own, on each rank.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEPENDS = "depends on the number of devices"
EXPECTED = {
    "codebook_of_each_rank": ("LD015", DEPENDS, "each rank updates a codebook beside the model with its own samples"),
    "codebook_of_all_ranks": ("", "", "the ranks reduce what they update a codebook with"),
    "queue_of_each_rank": ("LD015", "fault", "a queue of negatives, a buffer, gets the keys of each rank alone"),
    "queue_of_all_ranks": ("", "", "a queue of negatives gets the keys of all ranks"),
}


def trained(step):
    """Calls a function with the batches of two epochs."""
    x = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x)
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (batch,) in DataLoader(data, 8, sampler=sampler):
            step(batch)
    dist.destroy_process_group()


def _quantized(*, reduced):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    encoder = nn.Linear(8, 4)
    decoder = nn.Linear(4, 8)
    model = DDP(nn.ModuleDict({"encoder": encoder, "decoder": decoder}))
    model.module.forward = lambda x, codes: _decoded(encoder, decoder, x, codes)
    codes = torch.randn(12, 4, generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(x):
        made, z, nearest = model(x, codes)
        optimizer.zero_grad()
        (F.mse_loss(made, x) + 0.25 * F.mse_loss(z, codes[nearest])).backward()
        optimizer.step()
        hits = F.one_hot(nearest, len(codes)).float()
        sums = torch.cat([hits.t() @ z.detach(), hits.sum(0, keepdim=True).t()], dim=1)
        if reduced:
            dist.all_reduce(sums)
        codes.lerp_(torch.where(sums[:, 4:] > 0, sums[:, :4] / sums[:, 4:].clamp(min=1), codes), 0.3)

    trained(step)


def _decoded(encoder, decoder, x, codes):
    z = encoder(x)
    nearest = torch.cdist(z, codes).argmin(1)
    return decoder(z + (codes[nearest] - z).detach()), z, nearest


def codebook_of_each_rank():
    _quantized(reduced=False)


def codebook_of_all_ranks():
    _quantized(reduced=True)


class _Contrast(nn.Module):
    """Compares each sample with a queue of earlier ones."""

    def __init__(self, *, gathered):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.gathered = gathered
        self.register_buffer("queue", F.normalize(torch.randn(64, 4), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        query = F.normalize(self.encoder(x), dim=1)
        key = F.normalize(self.encoder(x + 0.1), dim=1).detach()
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().t()], dim=1)
        self.enqueue(key)
        return F.cross_entropy(scores / 0.2, torch.zeros(len(x), dtype=torch.long))

    def enqueue(self, keys):
        if self.gathered:
            parts = [torch.empty_like(keys) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, keys)
            keys = torch.cat(parts)
        begin = int(self.place)
        self.queue[begin : begin + len(keys)] = keys
        self.place[0] = (begin + len(keys)) % len(self.queue)


def _contrasted(*, gathered):
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = DDP(_Contrast(gathered=gathered))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def step(x):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    trained(step)


def queue_of_each_rank():
    _contrasted(gathered=False)


def queue_of_all_ranks():
    _contrasted(gathered=True)
