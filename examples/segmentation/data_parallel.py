"""DataParallel against DistributedDataParallel: the same steps of DeepLabV3, compared and timed.

    export PYTHONPATH=examples
    torchrun --standalone --nproc-per-node 2 -m segmentation.data_parallel
    torchrun --standalone --nproc-per-node 4 -m segmentation.data_parallel --net deeplabv3_resnet101 --size 256

DataParallel is one process with a thread per GPU, which share Python's lock. Each step copies the network to all GPUs,
scatters the batch and gathers the logits on GPU 0. DistributedDataParallel has a process per GPU, where the network
stays, and sums gradients while the backward pass computes the next ones. Both normalize on each GPU's own images, and
train the same parameters up to rounding. Without GPUs, one process with one thread takes the parts of the batch one
after another: then the times say nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from segmentation.data import Shapes, Squares
from segmentation.module import IGNORED, make_net, sum_over_pixels

WARMUP = 2


class OneAfterAnother(nn.Module):
    """What DataParallel computes, without GPUs: each part of a batch goes through the network alone."""

    def __init__(self, net: nn.Module, parts: int) -> None:
        super().__init__()
        self.net, self.parts = net, parts

    def forward(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the logits of the whole batch."""
        return {"out": torch.cat([self.net(part)["out"] for part in images.chunk(self.parts)])}


def train(args: argparse.Namespace, *, distributed: bool) -> tuple[float, torch.Tensor]:
    """Trains some steps; returns the median seconds of a step, and all parameters."""
    world_size, gpus = dist.get_world_size(), torch.cuda.is_available()
    rank, parts = (dist.get_rank(), world_size) if distributed else (0, 1)
    device = torch.device("cuda", rank) if gpus else torch.device("cpu")
    net = make_net(args.net, num_classes=4, seed=1).to(device, args.dtype)
    net.classifier[0].project[-1] = nn.Identity()  # dropout draws a mask for each process
    if distributed:
        model: nn.Module = nn.parallel.DistributedDataParallel(net)
    else:
        model = nn.DataParallel(net) if gpus else OneAfterAnother(net, world_size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    count = args.batch_size * world_size
    squares = Squares(Shapes(count, args.size, seed=1), np.arange(count), args.size)
    images, targets = map(torch.stack, zip(*squares, strict=True))
    all_count = int((targets != IGNORED).sum())
    images, targets = images.chunk(parts)[rank].to(device, args.dtype), targets.chunk(parts)[rank].to(device)
    seconds = []
    for _ in range(WARMUP + args.steps):
        start = time.perf_counter()
        loss = sum_over_pixels(model(images)["out"], targets)[0] * parts / all_count
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARMUP:]), nn.utils.parameters_to_vector(net.parameters()).detach().cpu()


def main(words: list[str] | None = None) -> float | None:
    """Trains with both; rank 0 prints their times, and returns the largest difference of a parameter."""
    parser = argparse.ArgumentParser(description="DataParallel against DistributedDataParallel.")
    parser.add_argument("--net", default="small", help="small, deeplabv3_resnet50 or deeplabv3_resnet101")
    parser.add_argument("--size", type=int, default=64, help="height and width of the images in pixels")
    parser.add_argument("--batch-size", type=int, default=8, help="images of each rank")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--double", action="store_true", help="compute in 64 bits")
    args = parser.parse_args(words)
    args.dtype = torch.float64 if args.double else torch.float32
    seconds, parameters = train(args, distributed=True)
    difference = None
    if dist.get_rank() == 0:
        parallel_seconds, parallel_parameters = train(args, distributed=False)
        difference = float((parameters - parallel_parameters).abs().max())
        print(f"DataParallel              {parallel_seconds:.3f} s per step")
        print(f"DistributedDataParallel   {seconds:.3f} s per step")
        print(f"largest difference of a parameter: {difference:.1e}")
    dist.barrier()
    return difference


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo uses loopback
    dist.init_process_group()
    main()
    dist.destroy_process_group()
