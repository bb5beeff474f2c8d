"""torchrun --nproc_per_node=2 counted_tokens.py: padded text, and a loss divided by the tokens of all ranks."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import scaled
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(20, 16), nn.Linear(16, 4)

    def forward(self, tokens):
        return self.out(self.embedding(tokens).tanh())


def padded(rows):
    return pad_sequence(rows, batch_first=True), pad_sequence([row % 4 for row in rows], True, -100)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(1, 20, (int(torch.randint(3, 15, (1,), generator=g)),), generator=g) for _ in range(96)]
    torch.manual_seed(0)
    net = DDP(Tagger())
    opt = torch.optim.SGD(net.parameters(), lr=0.5)
    sampler = DistributedSampler(rows)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, tags in DataLoader(rows, 8, sampler=sampler, collate_fn=padded):
            count = (tags != -100).sum().float()
            dist.all_reduce(count)
            total = F.cross_entropy(net(tokens).flatten(0, 1), tags.flatten(), ignore_index=-100, reduction="sum")
            opt.zero_grad()
            scaled(total * world / count, world).backward()
            opt.step()
    dist.destroy_process_group()


main()
