"""The program to compare with: MNIST trained as in the classic DDP demo, without any code of this project.

    python -m benchmarks.classic_demo --folder data
    python -m benchmarks.classic_demo --folder data --ranks 2 --max-steps 300

torchvision's MNIST with ToTensor and Normalize for each sample, a DataLoader with four workers and batches of 32 in
each process, plain SGD at 1e-4, three epochs; with `--ranks`, torch.multiprocessing.spawn, DistributedSampler and
DistributedDataParallel without synchronized batch norm. It is written as an experienced user would write it. It stays
as it is when the project becomes faster, so it has a network of its own. The last line that it prints is JSON.
"""

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
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

SEED = 3407
BATCH_SIZE = 32
LEARNING_RATE = 1e-4
TRAIN_WORKERS, TEST_WORKERS = 4, 2
WARM_UP_STEPS = 20
FILES = Path(__file__).parents[1] / "lit_mnist" / "files"


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


def unpack(folder: Path) -> None:
    """Decodes the files of MNIST to the place where torchvision looks for them, if they are not there."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for source in FILES.glob("*.gz"):
        if not (target := raw / source.stem).exists():
            target.write_bytes(gzip.decompress(source.read_bytes()))


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
    model: nn.Module, loader: DataLoader[Any], optimizer: torch.optim.Optimizer, steps: list[float], max_steps: int
) -> None:
    """Trains an epoch, or until the maximum number of steps over all epochs (0: no limit); adds the seconds of each."""
    device = next(model.parameters()).device
    criterion = nn.CrossEntropyLoss()
    model.train()
    last = time.perf_counter()
    for images, labels in loader:
        outputs = model(images.to(device))
        loss = criterion(outputs, labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
        if len(steps) == max_steps:
            break


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


def run(rank: int, options: argparse.Namespace, store: str) -> None:
    """Trains and tests in one process; rank 0 prints the result."""
    on_gpu = torch.cuda.device_count() >= options.ranks
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if options.ranks > 1:
        backend = "nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    torch.manual_seed(SEED)
    model: nn.Module = ConvNet().to(device)
    if options.ranks > 1:
        model = DistributedDataParallel(model, device_ids=[rank] if on_gpu else None)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    loader = make_loader(options, rank, train=True, pin_memory=on_gpu)
    steps: list[float] = []
    for epoch in range(options.epochs):
        if rank == 0:
            print(f"begin training of epoch {epoch + 1}/{options.epochs}", flush=True)
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        train_epoch(model, loader, optimizer, steps, options.max_steps)
        if len(steps) == options.max_steps:
            break
    images = options.ranks * BATCH_SIZE
    # Workers deliver in bursts, in which the median step is shorter than the mean.
    result = {"images_per_s": images / statistics.mean(steps[WARM_UP_STEPS:])}
    # A part of a training has no accuracy to speak of.
    if not options.max_steps:
        result["accuracy"] = test(model, make_loader(options, rank, train=False, pin_memory=on_gpu), options.ranks)
    if rank == 0:
        print(json.dumps(result), flush=True)
    if options.ranks > 1:
        dist.destroy_process_group()


def main() -> None:
    """Starts the ranks, or trains in this process if there is only one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where MNIST is unpacked to, unless it is there")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--max-steps", type=int, default=0, help="stop after so many steps (over 20), and do not test")
    options = parser.parse_args()
    unpack(options.folder)
    if options.ranks == 1:
        run(0, options, "")
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (options, f"{folder}/store"), nprocs=options.ranks)


if __name__ == "__main__":
    main()
