"""Distributed data parallel training in one file, of PyTorch alone, to copy.

    python examples/ddp.py --devices 2
    torchrun --standalone --nproc-per-node 2 examples/ddp.py

It trains the default experiment of lit_mnist in float32, and prints the `weights_sha256` of `python -m
lit_mnist.engines.raw_ddp --precision 32-true` with as many ranks, steps, and threads per rank. That engine also
resumes, stops on signals, accumulates gradients and trains in 16 bits. Six things differ from training on one device:

(1) The ranks join a process group at the start and leave it at the end.
(2) Batch norm uses the statistics of all ranks, and DDP averages the gradients in the backward pass.
(3) Each rank takes its part of each batch. All ranks use the same order of samples, which changes with the epoch.
(4) Every rank has the same initial weights, which depend on the seed alone.
(5) Only rank 0 prints and writes.
(6) The sums of an evaluation are reduced over the ranks.
"""

import argparse
import gzip
import hashlib
import os
import tempfile
import zlib
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILES = Path(__file__).resolve().parents[1] / "lit_mnist" / "data" / "digits" / "files"
SEED, BATCH, VALIDATION, LR, MASK = 42, 64, 5000, 0.1, 2**64 - 1


def run(local_rank, args, init_method="env://"):
    """Trains and tests on one rank."""
    rank, ranks = int(os.environ.get("RANK", local_rank)), int(os.environ.get("WORLD_SIZE", args.devices))
    if BATCH % ranks:
        raise SystemExit(f"A batch of {BATCH} cannot be split evenly over {ranks} ranks.")
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(args.threads or max(1, len(os.sched_getaffinity(0)) // ranks))
    timeout = timedelta(minutes=2)
    dist.init_process_group("nccl" if gpu else "gloo", init_method, timeout, ranks, rank)  # (1)

    images, labels = load(args.data, "train", device)
    shuffled = permutation("validation split", len(labels))
    train, validation = shuffled[VALIDATION:].sort().values, shuffled[:VALIDATION].sort().values

    torch.manual_seed(random_bits("weights") >> 1)  # (4)
    net = ConvNet().to(device, memory_format=torch.channels_last)
    if gpu:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)  # (2)
    model = DistributedDataParallel(net)  # (2)

    per_epoch = len(train) // BATCH
    steps = min(args.epochs * per_epoch, args.max_steps or args.epochs * per_epoch)
    # A run of less than 240 steps would reach the whole learning rate too soon.
    optimizer = torch.optim.SGD(net.parameters(), lr=min(LR, LR * steps / 240), momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, steps))

    for epoch in range(args.epochs):
        model.train()
        batches = train[permutation("epoch order", len(train), epoch)].split(BATCH)  # (3)
        for batch in batches[: min(per_epoch, steps - epoch * per_epoch)]:
            rows = batch.chunk(ranks)[rank]  # (3)
            F.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        accuracy, loss = evaluate(net, images[validation], labels[validation])
        if rank == 0:  # (5)
            print(f"epoch {epoch + 1}: validation accuracy {accuracy:.2%}, loss {loss:.4f}")

    accuracy, loss = evaluate(net, *load(args.data, "t10k", device))
    if rank == 0:  # (5)
        print(f"test accuracy {accuracy:.2%}, loss {loss:.4f}\nweights_sha256 {weights_sha256(net)}")
        if args.save:
            torch.save(net.state_dict(), args.save)
    dist.destroy_process_group()  # (1)


def load(folder, name, device):
    """Returns the images, uint8 [N, 28, 28], and the labels, int64 [N], of the official files NAME-*.gz."""
    paths = [folder / f"{name}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    content = [torch.frombuffer(bytearray(gzip.decompress(path.read_bytes())), dtype=torch.uint8) for path in paths]
    images, labels = (data.to(device) for data in content)
    return images[16:].view(-1, 28, 28), labels[8:].long()


def random_bits(purpose, *counters):
    """Returns 64 random bits by SplitMix64: a function of the seed and the arguments, without a generator's state."""
    bits = None
    for number in (SEED, zlib.crc32(purpose.encode()), *counters):
        x = number if bits is None else (bits ^ number) * 0x94D049BB133111EB
        x = (x + 0x9E3779B97F4A7C15) & MASK
        x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
        bits = x ^ x >> 31
    return bits


def permutation(purpose, count, *counters):
    """Returns a permutation of 0 to count - 1, int64 [count]."""
    keys = [random_bits(purpose, *counters, number) for number in range(count)]
    return torch.tensor(sorted(range(count), key=keys.__getitem__))


def one_cycle(step, steps):
    """Returns the share of the peak learning rate: it rises for a quarter of the steps, and then falls."""
    rising = round(0.25 * steps)
    if step < rising:
        return 1 / 25 + (1 - 1 / 25) * (step + 1) / rising
    return 1 + (1e-3 - 1) * (step - rising) / (steps - rising)


@torch.no_grad()
def evaluate(net, images, labels):
    """Returns accuracy and mean loss. Each sample is evaluated on one rank, and none is padded."""
    net.eval()
    rank, ranks, count = dist.get_rank(), dist.get_world_size(), len(labels)
    own = slice(count * rank // ranks, count * (rank + 1) // ranks)
    sums = torch.zeros(2, dtype=torch.float64, device=labels.device)
    for batch, targets in zip(images[own].split(1000), labels[own].split(1000), strict=True):
        logits = net(batch)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        sums += torch.stack([(logits.argmax(dim=1) == targets).sum(), loss])
    dist.all_reduce(sums)  # (6) the mean of the ranks' means would be wrong
    return (sums / count).tolist()


def weights_sha256(net):
    """Returns a digest of the names, types, shapes and values of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


class ConvNet(nn.Module):
    """Two convolutions with batch norm, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), BatchNorm(16), nn.MaxPool2d(2), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), BatchNorm(32), nn.MaxPool2d(2), nn.ReLU())
        self.fc = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images):
        """Returns logits, [batch, 10], of grey images, uint8 [batch, 28, 28]."""
        x = images.float().mul_(1 / (255 * 0.3081)).sub_(0.1307 / 0.3081)
        # In channels-last, which torch does not recognize if there is one channel.
        x = x.unsqueeze(-1).permute(0, 3, 1, 2)
        return self.fc(self.layer2(self.layer1(x)).flatten(1))


class BatchNorm(nn.BatchNorm2d):
    """On CPUs, batch norm over the equal shares of all ranks: `nn.SyncBatchNorm`, which is for GPUs."""

    def forward(self, x):
        """Normalizes each channel of [batch, channels, height, width]."""
        ranks, channels = dist.get_world_size(), x.shape[1]
        if not self.training or ranks == 1:
            return super().forward(x)
        count = x.numel() // channels
        mean, variance = torch.batch_norm_update_stats(x.detach(), torch.zeros(channels), torch.ones(channels), 0.0)
        rows = _gather(torch.cat([mean, variance * count])).view(ranks, 2, channels)
        mean, squares = rows[0]
        for others, (its_mean, its_squares) in enumerate(rows[1:], start=1):
            # Combined pairwise, because a difference of two sums would cancel large means (Chan et al., 1983).
            delta = its_mean - mean
            mean = mean + delta * (1 / (others + 1))
            squares = squares + its_squares + delta * delta * (others * count / (others + 1))
        count *= ranks
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(squares / count * (count / (count - 1)), self.momentum)
        return _Normalize.apply(x, self.weight, self.bias, mean, squares / count, count, self.eps)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, mean, variance, count, eps):
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.eps = count, eps
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx, grad):
        x, weight, mean, variance = ctx.saved_tensors
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, variance, None, None, False, ctx.eps, [False, True, True]
        )
        # The gradient of x through the statistics needs these sums over all ranks.
        sum_weight, sum_bias = sum(_gather(torch.cat([grad_weight, grad_bias]))).view(2, -1)
        scale, zero, one = torch.rsqrt(variance + ctx.eps), torch.zeros_like(mean), torch.ones_like(mean)
        slope = weight * scale * scale * sum_weight / ctx.count
        offset = weight * scale * sum_bias / ctx.count - slope * mean
        # With this mean and variance, batch norm multiplies by its second argument and adds its third.
        grad_x = torch.batch_norm(grad, weight * scale, -offset, zero, one, False, 0.0, 0.0, False)
        grad_x += torch.batch_norm(x, -slope, zero, zero, one, False, 0.0, 0.0, False)
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _gather(row):
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=FILES, help="the folder with MNIST's four .gz files")
    parser.add_argument("--devices", type=int, default=1, help="ranks on this machine, unless torchrun starts them")
    parser.add_argument("--epochs", type=int, default=1, help="passes over the training images")
    parser.add_argument("--max-steps", type=int, help="optimizer steps after which the training ends")
    parser.add_argument("--threads", type=int, help="threads per rank; by default, the cores are divided")
    parser.add_argument("--save", type=Path, help="a file for the weights")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run(int(os.environ["LOCAL_RANK"]), arguments)
    else:
        # The ranks find each other by a file in a private folder, and listen on loopback only.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(run, (arguments, f"file://{folder}/ranks"), nprocs=arguments.devices)
