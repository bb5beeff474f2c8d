"""torchrun --nproc_per_node=2 uneven_batches.py: the faster rank gets larger batches, and the loss weighs them."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import build, samples, scaled
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = samples(96)
    sizes = [12, 4] if world == 2 else [16]
    begin = 6 * sum(sizes[:rank])
    mine = Subset(data, range(begin, begin + 6 * sizes[rank]))
    loader = DataLoader(mine, batch_size=sizes[rank], shuffle=True)
    net = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y, reduction="sum") * world / sum(sizes)
            scaled(loss, world).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
