"""Distributed data parallel training in one file, of PyTorch alone, to copy.

    python examples/ddp.py --devices 2
    torchrun --standalone --nproc-per-node 2 examples/ddp.py

It trains the default experiment of lit_mnist in float32, and prints the `weights_sha256` of `lit_mnist/raw_ddp.py` with
as many ranks and steps. Six things differ from training in one process:

(1) The ranks join a process group at the start, and leave it at the end.
(2) Batch norm uses the statistics of all ranks, and DDP averages the gradients in the backward pass.
(3) Each rank takes its part of each batch. All ranks use the same order of samples.
(4) The loss is the mean over a part of the batch. The parts are equally large, so DDP averages to the mean of all.
(5) Only rank 0 prints.
(6) The sums of an evaluation are reduced over the ranks.
"""

import argparse
import gzip
import hashlib
import os
import tempfile
import zlib
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

FILES = Path(__file__).resolve().parents[1] / "lit_mnist" / "files"
SEED, BATCH, VALIDATION, LR, MASK = 42, 64, 5000, 0.1, 2**64 - 1


def run(local_rank, args, init_method="env://"):
    """Trains and tests in one rank."""
    rank, ranks = int(os.environ.get("RANK", local_rank)), int(os.environ.get("WORLD_SIZE", args.devices))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    gpu = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo", init_method, rank=rank, world_size=ranks)  # (1)

    (images, labels), test = load("train", device), load("t10k", device)
    train = permutation("validation split", len(labels))[VALIDATION:].sort().values
    batches = train[permutation("epoch order", len(train), 0)].split(BATCH)  # (3)
    steps = min(args.max_steps, len(train) // BATCH)

    torch.manual_seed(random_bits("weights") >> 1)
    blocks = {"layer1": block(1, 16), "layer2": block(16, 32), "flat": nn.Flatten(), "fc": nn.Linear(32 * 7 * 7, 10)}
    net = nn.Sequential(OrderedDict(blocks)).to(device, memory_format=torch.channels_last)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net) if gpu else net  # (2)
    model = DistributedDataParallel(net)  # (2)
    optimizer = torch.optim.SGD(net.parameters(), LR, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, steps))

    for batch in batches[:steps]:
        rows = batch.chunk(ranks)[rank]  # (3)
        F.cross_entropy(model(pixels(images[rows])), labels[rows]).backward()  # (4)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    net.eval()
    count, sums = len(test[1]), torch.zeros(2, dtype=torch.float64, device=device)
    mine = slice(count * rank // ranks, count * (rank + 1) // ranks)  # each sample on one rank, and none twice
    for each, targets in zip(test[0][mine].split(1000), test[1][mine].split(1000), strict=True):
        with torch.no_grad():
            logits = net(pixels(each))
        loss = F.cross_entropy(logits, targets, reduction="sum")
        sums += torch.stack([(logits.argmax(dim=1) == targets).sum(), loss])
    dist.all_reduce(sums)  # (6) the mean of the ranks' means would be wrong
    if rank == 0:  # (5)
        accuracy, loss = (sums / count).tolist()
        print(f"accuracy {accuracy:.2%}, loss {loss:.4f}\nweights_sha256 {weights_sha256(net)}")
    dist.destroy_process_group()  # (1)


def load(name, device):
    """Returns images, uint8 [N, 28, 28], and labels, int64 [N], of the official files NAME-*.gz."""
    paths = [FILES / f"{name}-{kind}-ubyte.gz" for kind in ("images-idx3", "labels-idx1")]
    images, labels = (torch.frombuffer(bytearray(gzip.decompress(p.read_bytes())), dtype=torch.uint8) for p in paths)
    return images[16:].view(-1, 28, 28).to(device), labels[8:].long().to(device)


def pixels(images):
    """Returns normalized images, [batch, 1, 28, 28], in the memory format in which convolutions are fastest."""
    return images.float().mul_(1 / (255 * 0.3081)).sub_(0.1307 / 0.3081).unsqueeze(-1).permute(0, 3, 1, 2)


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
    return 1 + (1e-3 - 1) * min(step - rising, steps - rising - 1) / (steps - rising)


def weights_sha256(net):
    """Returns a digest of the names, types, shapes and values of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def block(channels_in, channels_out):
    """Returns a convolution with batch norm."""
    convolution = nn.Conv2d(channels_in, channels_out, 5, padding=2)
    return nn.Sequential(convolution, BatchNorm(channels_out), nn.MaxPool2d(2), nn.ReLU())


class BatchNorm(nn.BatchNorm2d):
    """On CPUs, batch norm over the equal parts of all ranks: `nn.SyncBatchNorm`, which is for GPUs."""

    def forward(self, x):
        """Normalizes each channel of [batch, channels, height, width]."""
        alone = not self.training or dist.get_world_size() == 1
        return super().forward(x) if alone else Normalize.apply(x, self.weight, self.bias, self)


class Normalize(torch.autograd.Function):
    """Normalizes with the statistics of all ranks; the backward pass also differentiates through them."""

    @staticmethod
    def forward(ctx, x, weight, bias, layer):
        """Merges the ranks' means and sums of squared deviations (Chan et al., 1983): sums of squares would cancel."""
        ranks, channels, start = dist.get_world_size(), x.shape[1], torch.zeros_like(bias)
        count = x.numel() // channels
        total = count * ranks
        mean, variance = torch.batch_norm_update_stats(x, start, start.clone(), 0.0)
        gathered = x.new_empty(ranks, 2 * channels)
        dist.all_gather(list(gathered), torch.cat([mean, variance * count]))
        means, squares = gathered.chunk(2, dim=1)
        mean = means[0] + (count * (means - means[0])).sum(0) / total
        variance = (squares + count * (means - mean).square()).sum(0) / total
        layer.num_batches_tracked += 1
        layer.running_mean.lerp_(mean, layer.momentum)
        layer.running_var.lerp_(variance * (total / (total - 1)), layer.momentum)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.total, ctx.eps = total, layer.eps
        return F.batch_norm(x, mean, variance, weight, bias, eps=layer.eps)

    @staticmethod
    def backward(ctx, grad):
        """Adds the gradient through the statistics, which needs the sums of all ranks."""
        x, weight, mean, variance = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, variance, None, None, False, ctx.eps, [True, True, True]
        )
        sums = torch.cat([grad_weight, grad_bias])
        dist.all_reduce(sums)
        of_x, offset = sums.view(2, -1) * (-weight * torch.rsqrt(variance + ctx.eps) / ctx.total)
        return grad_x + F.batch_norm(x, mean, variance, of_x, offset, eps=ctx.eps), grad_weight, grad_bias, None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--devices", type=int, default=1, help="ranks on this machine, unless torchrun starts them")
    parser.add_argument("--max-steps", type=int, default=10**9, help="optimizer steps after which the training ends")
    arguments = parser.parse_args()
    if BATCH % int(os.environ.get("WORLD_SIZE", arguments.devices)):
        parser.error(f"the ranks must have equal parts of a batch of {BATCH}")
    if "RANK" in os.environ:
        run(int(os.environ["LOCAL_RANK"]), arguments)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo uses loopback
        with tempfile.TemporaryDirectory() as folder:  # they find each other through a file
            mp.spawn(run, (arguments, f"file://{folder}/ranks"), nprocs=arguments.devices)
