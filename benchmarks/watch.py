"""What `ddp-doctor watch` costs: one training on two ranks, in blocks of steps that are watched and not, in turn.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.watch --rounds 15

Prints the ratio of the time of a watched block to the mean of its two neighbours, and the time of a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_doctor.watch.rank import Watch

_BLOCK, _CHANNELS = 40, 64


def main() -> None:
    """Measures, and prints from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=40, help="images per rank: sets the time of a step")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, _CHANNELS, 5), nn.BatchNorm2d(_CHANNELS), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(_CHANNELS, _CHANNELS, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * _CHANNELS, 512), nn.ReLU(), nn.Linear(512, 10)),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, targets = torch.randn(options.batch_size, 1, 28, 28), torch.randint(10, (options.batch_size,))

    def block() -> float:
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(_BLOCK):
            optimizer.zero_grad()
            F.cross_entropy(model(images), targets).backward()
            optimizer.step()
        dist.barrier()
        return time.perf_counter() - begun

    def watched(folder: Path) -> float:
        watch = Watch(folder, compares=True)
        watch.models.append(model)
        watch.install()
        seconds = block()
        watch.close()
        return seconds

    block()
    ratios, plain = [], [block()]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            seconds = watched(Path(folder, str(number)))
            plain.append(block())
            ratios.append(seconds / ((plain[-2] + plain[-1]) / 2))
    if dist.get_rank() == 0:
        low, median, high = statistics.quantiles(ratios, n=4)
        size = sum(parameter.numel() for parameter in net.parameters())
        print(f"{1e3 * statistics.median(plain) / _BLOCK:.1f} ms per step, {size} parameters")
        print(f"watched / unwatched: median {median:.4f}, quartiles {low:.4f} to {high:.4f}, {options.rounds} rounds")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
