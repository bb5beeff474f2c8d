"""The program to compare with: MNIST trained as in the classic DDP demo, without any code of this project.

    python -m benchmarks.classic_demo --folder data
    python -m benchmarks.classic_demo --folder data --ranks 2 --max-steps 300

torchvision's MNIST with ToTensor and Normalize for each sample, a DataLoader with four workers and batches of 32 in
each process, plain SGD at 1e-4, three epochs; with `--ranks`, torch.multiprocessing.spawn, DistributedSampler and
DistributedDataParallel without synchronized batch norm. It is written as an experienced user would write it, and
stays as it is when the project becomes faster, so it has a network of its own. The last line that it prints is JSON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchvision import transforms
from torchvision.datasets import MNIST

from lit_mnist.data.digits.mnist import EMBEDDED, FILES
from lit_mnist.distributed.rendezvous import use_loopback
from lit_mnist.profiling.timing import WARM_UP_STEPS, unshared_memory

SEED = 3407
BATCH_SIZE = 32
LEARNING_RATE = 1e-4
TRAIN_WORKERS, TEST_WORKERS = 4, 2


class ConvNet(nn.Module):
    """The demo's network: two 5x5 convolutions with batch norm, and one linear layer."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.layer2 = nn.Sequential(
            nn.Conv2d(16, 32, kernel_size=5, stride=1, padding=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=2, stride=2),
        )
        self.fc = nn.Linear(7 * 7 * 32, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits, [batch, classes], of images, [batch, 1, 28, 28]."""
        out = self.layer2(self.layer1(x))
        return self.fc(out.reshape(out.size(0), -1))


@dataclass
class Clock:
    """Seconds of the steps and of the epochs of a training, as one process sees them."""

    steps: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    peak_memory: int = 0


def unpack(folder: Path) -> None:
    """Unpacks the embedded MNIST to the place where torchvision looks for it, if it is missing."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for file in FILES:
        target = raw / file.name
        if not target.exists():
            with gzip.open(EMBEDDED / f"{file.name}.gz") as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)


def make_loader(options: argparse.Namespace, rank: int, *, train: bool, pin_memory: bool) -> DataLoader[Any]:
    """Returns a loader over a rank's part of the training or of the test set."""
    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    dataset = MNIST(str(options.folder), train=train, transform=transform)
    sampler: DistributedSampler[Any] | None = None
    if options.ranks > 1:
        sampler = DistributedSampler(dataset, options.ranks, rank, shuffle=train)
    return DataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=train and sampler is None,
        sampler=sampler,
        num_workers=TRAIN_WORKERS if train else TEST_WORKERS,
        pin_memory=pin_memory,
    )


def train_epoch(
    model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, clock: Clock, most_steps: int
) -> None:
    """Trains an epoch, or until the maximum number of steps over all epochs (0: no limit)."""
    device = next(model.parameters()).device
    criterion = nn.CrossEntropyLoss()
    model.train()
    began = last = time.perf_counter()
    for images, labels in loader:
        outputs = model(images.to(device))
        loss = criterion(outputs, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        clock.steps.append(now - last)
        last = now
        if len(clock.steps) == most_steps:
            break
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    clock.epochs.append(time.perf_counter() - began)
    clock.peak_memory = max(clock.peak_memory, unshared_memory(os.getpid()))


@torch.no_grad()
def test(model: nn.Module, loader: DataLoader[Any], ranks: int) -> float:
    """Returns the share of the test set that is classified correctly."""
    device = next(model.parameters()).device
    counts = torch.zeros(2, device=device)
    model.eval()
    for images, labels in loader:
        outputs = model(images.to(device))
        counts[0] += (outputs.argmax(1) == labels.to(device)).sum()
        counts[1] += labels.size(0)
    if ranks > 1:
        dist.all_reduce(counts)
    return float(counts[0] / counts[1])


def run(rank: int, options: argparse.Namespace, meeting: str) -> None:
    """Trains and tests in one process; rank 0 prints the result."""
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = torch.cuda.device_count() >= options.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if options.ranks > 1:
        dist.init_process_group(
            "nccl" if on_gpu else "gloo", init_method=f"file://{meeting}", rank=rank, world_size=options.ranks
        )
    torch.manual_seed(SEED)
    model: nn.Module = ConvNet().to(device)
    if options.ranks > 1:
        model = DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    loader = make_loader(options, rank, train=True, pin_memory=on_gpu)
    clock = Clock()
    for epoch in range(options.epochs):
        if rank == 0:
            print(f"begin training of epoch {epoch + 1}/{options.epochs}", flush=True)
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, clock, options.max_steps)
        if len(clock.steps) == options.max_steps:
            break
    # A part of a training has no accuracy to speak of: only its speed is asked for.
    accuracy = None
    if not options.max_steps:
        accuracy = test(model, make_loader(options, rank, train=False, pin_memory=on_gpu), options.ranks)
    if rank == 0:
        print(json.dumps(numbers_of(clock, options.ranks, accuracy)), flush=True)
    if options.ranks > 1:
        dist.destroy_process_group()


def numbers_of(clock: Clock, ranks: int, accuracy: float | None) -> dict[str, float]:
    """Returns what is printed.

    `images_per_s` over all ranks follows from the median step after the warm-up, `mean_images_per_s` from all steps
    after it: loader workers deliver in bursts, and then the median step is shorter than the mean. The memory is rank
    0's own without its workers', at the end of an epoch.
    """
    steps = clock.steps[WARM_UP_STEPS:]
    return {
        "images_per_s": ranks * BATCH_SIZE / statistics.median(steps),
        "mean_images_per_s": ranks * BATCH_SIZE / statistics.mean(steps),
        "seconds": sum(clock.epochs),
        **({"accuracy": accuracy} if accuracy is not None else {}),
        "memory_bytes": clock.peak_memory,
    }


def main() -> None:
    """Starts the ranks, or trains in this process if there is only one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where MNIST is unpacked to, unless it is there")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps, and do not test")
    parser.add_argument("--threads", type=int, help="threads of each rank; by default torch's own choice")
    options = parser.parse_args()
    if options.max_steps and options.max_steps <= WARM_UP_STEPS:
        parser.error(f"--max-steps must be above the {WARM_UP_STEPS} steps that are left out, or be left out itself")
    unpack(options.folder)
    if options.ranks == 1:
        run(0, options, "")
        return
    use_loopback()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (options, f"{folder}/meeting"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
