"""DataParallel against DistributedDataParallel: the same training of DeepLabV3 on N GPUs, compared and timed.

    python data_parallel.py --devices 4 --net deeplabv3_resnet101 --size 256 --batch 8

It repeats the subject of the tutorial "Data-Distributed Training". DataParallel is one process with a thread per GPU.
In each step, it copies the network to all GPUs, scatters the batch, gathers the logits on the first GPU and adds up the
gradients there. DistributedDataParallel has a process per GPU, whose network stays where it is, and exchanges the
gradients while the backward pass computes the next ones. Both compute batch norm on each GPU's own images, so that they
train the same parameters up to rounding, which `--double` shows. Without GPUs, the parts of a batch go through one
network, one after another.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from segmentation import LitSegmenter
from segmentation.images import MEAN, STD
from segmentation.loss import pixel_loss
from segmentation.shapes import CLASSES, make_image
from torch import nn

_WARMUP = 3


class DataParallelOnCPU(nn.Module):
    """What DataParallel computes, without GPUs: each part of a batch goes through the network alone."""

    def __init__(self, net: nn.Module, parts: int) -> None:
        super().__init__()
        self.net, self.parts = net, parts

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the whole batch."""
        return torch.cat([self.net(part) for part in images.chunk(self.parts)])


def load_batch(args: argparse.Namespace, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the normalized images and the classes of a global batch of generated shapes."""
    numbers = [(step % 2) * args.batch * args.devices + number for number in range(args.batch * args.devices)]
    images, masks = zip(*(make_image(seed=1, number=number, side=args.size) for number in numbers), strict=True)
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std, torch.from_numpy(np.stack(masks)).long()


def train(args: argparse.Namespace, kind: str, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Trains a few steps as one of the processes, and returns the seconds of a step and the parameters."""
    device = torch.device("cuda", rank) if args.gpus else torch.device("cpu")
    dtype = torch.float64 if args.double else torch.float32
    net = LitSegmenter(len(CLASSES), args.net, dropout=0.0).net.to(device, dtype)
    model: nn.Module = net
    if kind == "DataParallel":
        devices = list(range(args.devices))
        model = nn.DataParallel(net, devices) if args.gpus else DataParallelOnCPU(net, args.devices)
    elif kind == "DistributedDataParallel":
        model = nn.parallel.DistributedDataParallel(net, device_ids=[rank] if args.gpus else None)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    batches = [tuple(part.chunk(world_size)[rank].to(device) for part in load_batch(args, step)) for step in range(2)]
    seconds = []
    for step in range(_WARMUP + args.steps):
        start = time.perf_counter()
        images, targets = batches[step % 2]
        loss, _ = pixel_loss(model(images.to(dtype)), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    parameters = {name: parameter.detach().cpu() for name, parameter in net.named_parameters()}
    return {"seconds": statistics.median(seconds[_WARMUP:]), "parameters": parameters}


def train_rank(rank: int, args: argparse.Namespace, port: int, result: str) -> None:
    """Trains as one process of DistributedDataParallel. Rank 0 saves what `train` returns."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl" if args.gpus else "gloo", address, rank=rank, world_size=args.devices)
    torch.set_num_threads(args.threads)
    found = train(args, "DistributedDataParallel", rank, args.devices)
    if rank == 0:
        torch.save(found, result)
    dist.destroy_process_group()


def train_distributed(args: argparse.Namespace) -> dict[str, Any]:
    """Starts the processes of DistributedDataParallel, and returns what rank 0 has computed."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port, result = free.getsockname()[1], Path(folder) / "result.pt"
        free.close()
        mp.spawn(train_rank, (args, port, str(result)), nprocs=args.devices)
        return torch.load(result, weights_only=True)


def main() -> None:
    """Trains with both, and prints their times and how much their parameters differ."""
    parser = argparse.ArgumentParser(description="DataParallel against DistributedDataParallel.")
    parser.add_argument("--devices", type=int, default=2, help="number of GPUs, or of processes on a CPU")
    parser.add_argument("--net", default="deeplabv3_small", help="see LitSegmenter")
    parser.add_argument("--size", type=int, default=64, help="height and width of the images in pixels")
    parser.add_argument("--batch", type=int, default=8, help="images of each device")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--double", action="store_true", help="compute in 64 bits")
    args = parser.parse_args()
    args.gpus = torch.cuda.is_available()
    args.threads = max(1, torch.get_num_threads() // args.devices)
    distributed, parallel = train_distributed(args), train(args, "DataParallel")
    pairs = zip(distributed["parameters"].values(), parallel["parameters"].values(), strict=True)
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    print(
        f"{args.net}, {args.batch * args.devices} images of {args.size} x {args.size} per step, median of {args.steps}"
    )
    print(f"DataParallel              {parallel['seconds']:8.4f} s per step")
    print(f"DistributedDataParallel   {distributed['seconds']:8.4f} s per step")
    print(f"largest difference of their parameters: {difference:.1e}")


if __name__ == "__main__":
    main()
