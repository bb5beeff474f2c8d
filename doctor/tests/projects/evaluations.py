"""Programs that evaluate on several ranks and report a metric; some report that of one rank, or count samples twice.

Each function is a training of its own, on each rank.
"""

import logging
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset, random_split

FAULT, DEPENDS, NOTE = "fault", "depends on the number of devices", "note"
EXPECTED = {
    "prints_own_loss": ("LD024", FAULT, "rank 0 prints the validation loss of its own samples"),
    "logs_own_accuracy": ("LD024", FAULT, "rank 0 logs the accuracy of its own samples after a barrier"),
    "sums_the_means": ("LD024", FAULT, "the ranks' mean losses are summed, and not divided"),
    "mean_of_uneven_means": ("LD024", DEPENDS, "the mean of the ranks' means over 3 and 2 samples"),
    "best_by_mean_of_scores": ("LD024", FAULT, "a condition keeps the best mean of the F1 scores of the ranks"),
    "best_by_counted_score": ("", "", "the same, but the counts of the ranks are summed before"),
    "padded_small_set": ("LD023", FAULT, "9 validation samples are padded to 10"),
    "padded_large_set": ("LD023", NOTE, "4001 validation samples are padded to 4002"),
    "own_threshold": ("LD024", FAULT, "rank 0 prints a threshold of its own samples, whose labels are 0.0 and 1.0"),
    "padded_and_own_loss": ("LD024", FAULT, "9 padded validation samples, and rank 0 prints the loss of its own"),
    "progress_of_rank_0": ("", "", "rank 0 prints its own means in the loop; at its end its median and reduced means"),
    "progress_of_padded_ranks": ("LD023", NOTE, "the same with 4001 validation samples that are padded"),
    "split_of_each_rank": (
        "LD005",
        FAULT,
        "random_split after a seed per rank; a data set of its own adds noise to it",
    ),
    "split_of_all_ranks": ("", "", "the same split on all ranks, and a seed per rank for the noise"),
    "reduced_sums": ("", "", "sums and counts are reduced"),
    "rank_0_evaluates_all": ("", "", "rank 0 evaluates all samples without the wrapper"),
    "each_rank_prints": ("", "", "each rank prints its own loss with its number"),
    "gathers_predictions": ("", "", "all predictions are gathered before the metric"),
    "prints_training_loss": ("", "", "rank 0 prints its own training loss beside a reduced validation loss"),
    "reports_its_times": ("", "", "rank 0 prints the seconds and the samples per second of an evaluation"),
}


def setting(validation=33, padded=False):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(64 + validation, 8, generator=torch.Generator().manual_seed(3))
    y = (x[:, :3] + 0.5 * x[:, 3:6]).argmax(1)
    train, held = TensorDataset(x[:64], y[:64]), TensorDataset(x[64:], y[64:])
    if padded:
        held = DataLoader(held, 64, sampler=DistributedSampler(held, shuffle=False))
    else:
        held = DataLoader(Subset(held, range(rank, validation, world)), 8)
    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    return rank, model, DataLoader(train, 8, sampler=DistributedSampler(train)), held


def train(model, loader, evaluate, epochs=2):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(epochs):
        loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            evaluate(epoch, loss.item())
    dist.destroy_process_group()


def sums(model, loader):
    found = torch.zeros(3)
    for x, y in loader:
        logits = model.module(x)
        right = (logits.argmax(1) == y).sum()
        found += torch.stack([F.cross_entropy(logits, y, reduction="sum"), right, torch.tensor(len(y))])
    return found


def prints_own_loss():
    rank, model, loader, held = setting()

    def evaluate(epoch, _):
        loss, _, count = sums(model, held)
        if rank == 0:
            print(f"epoch {epoch} val loss {loss / count:.4f}")

    train(model, loader, evaluate)


def logs_own_accuracy():
    logging.basicConfig(level=logging.INFO)
    rank, model, loader, held = setting()

    def evaluate(epoch, _):
        _, right, count = sums(model, held)
        dist.barrier()
        if rank == 0:
            logging.info("epoch %d: accuracy %.3f, loss %.4f", epoch, right / count, _ / count)

    train(model, loader, evaluate)


def sums_the_means():
    rank, model, loader, held = setting(32)

    def evaluate(epoch, _):
        loss, _, count = sums(model, held)
        mean = loss / count
        dist.all_reduce(mean)
        if rank == 0:
            print("validation", mean.item())

    train(model, loader, evaluate)


def mean_of_uneven_means():
    rank, model, loader, held = setting(5)

    def evaluate(epoch, _):
        loss, _, count = sums(model, held)
        mean = loss / count
        dist.all_reduce(mean)
        if rank == 0:
            print("validation", (mean / dist.get_world_size()).item())

    train(model, loader, evaluate)


def keeps_the_best(combine):
    """Prints the F1 score of one class, and saves the weights of the best one."""
    rank, model, loader, held = setting(160)
    best = -1.0

    def evaluate(epoch, _):
        nonlocal best
        counts = torch.zeros(3)
        for x, y in held:
            guessed, right = model.module(x).argmax(1) == 0, y == 0
            counts += torch.stack([(guessed & right).sum(), guessed.sum(), right.sum()])
        score = combine(counts)
        if rank == 0:
            print(f"epoch {epoch}: f1 {100 * score:.2f} %")
        if score > best:
            best = score
            if rank == 0:
                torch.save(model.module.state_dict(), "best.pt")

    train(model, loader, evaluate)


def f1(counts):
    both, guessed, right = counts.tolist()
    return 2 * both / max(guessed + right, 1)


def best_by_mean_of_scores():
    def combine(counts):
        mean = torch.tensor(f1(counts))
        dist.all_reduce(mean)
        return (mean / dist.get_world_size()).item()

    keeps_the_best(combine)


def best_by_counted_score():
    def combine(counts):
        dist.all_reduce(counts)
        return f1(counts)

    keeps_the_best(combine)


def _reduced(validation, padded):
    rank, model, loader, held = setting(validation, padded)

    def evaluate(epoch, _):
        found = sums(model, held)
        dist.all_reduce(found)
        if rank == 0:
            print("validation loss", (found[0] / found[2]).item())

    train(model, loader, evaluate)


def padded_small_set():
    _reduced(9, True)


def padded_large_set():
    _reduced(4001, True)


def own_threshold():
    rank, model, loader, held = setting(64)
    x, y = held.dataset.dataset.tensors
    held = DataLoader(Subset(TensorDataset(x, (y == 0).float()), held.dataset.indices), 8)

    def middle(scores, labels):
        """Returns the middle between the mean scores of the two classes."""
        if not set(labels.tolist()) <= {0.0, 1.0}:
            raise ValueError("labels must be 0 and 1")
        return (scores[labels == 0].mean() + scores[labels == 1].mean()) / 2

    def evaluate(epoch, _):
        scores, labels = zip(*((model.module(x)[:, 0].sigmoid(), y) for x, y in held), strict=True)
        threshold = middle(torch.cat(scores), torch.cat(labels))
        if rank == 0:
            print(f"epoch {epoch} threshold {threshold:.4f}")

    train(model, loader, evaluate)


def padded_and_own_loss():
    rank, model, loader, held = setting(9, True)

    def evaluate(epoch, _):
        loss, _, count = sums(model, held)
        if rank == 0:
            print(f"epoch {epoch} val loss {loss / count:.4f}")

    train(model, loader, evaluate)


def _with_progress(validation, padded):
    rank, model, loader, held = setting(validation, padded)
    if padded:
        held = DataLoader(held.dataset, 8, sampler=held.sampler)

    def with_progress(meters):
        """Yields the batches, and lets rank 0 print the means so far after every second one and the last one."""
        for number, batch in enumerate(held):
            yield batch
            if rank == 0 and (number % 2 == 0 or number == len(held) - 1):
                print(f"Test: [{number}/{len(held)}] loss: {meters[0] / meters[1]:.4f}")

    def evaluate(epoch, _):
        meters, losses = torch.zeros(2), []
        for x, y in with_progress(meters):
            losses.append(F.cross_entropy(model.module(x), y))
            meters += torch.stack([losses[-1] * len(y), torch.tensor(len(y))])
        dist.all_reduce(meters)
        if rank == 0:
            print(f"averaged: loss: {torch.stack(losses).median():.4f} ({meters[0] / meters[1]:.4f})")

    train(model, loader, evaluate)


def progress_of_rank_0():
    _with_progress(64, False)


def progress_of_padded_ranks():
    _with_progress(4001, True)


class Noisy(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + 0.01 * torch.randn_like(x), y


def _split(of_each_rank):
    rank, model, loader, _ = setting()
    torch.manual_seed(7 + of_each_rank * rank)
    train_set, held = random_split(loader.dataset, [48, 16])
    torch.manual_seed(100 + rank)
    loader = DataLoader(Noisy(train_set), 8, sampler=DistributedSampler(train_set))
    held = DataLoader(held, 8, sampler=DistributedSampler(held, shuffle=False))

    def evaluate(epoch, _):
        total = sums(model, held)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0] / total[2]:.6f}")

    train(model, loader, evaluate)


def split_of_each_rank():
    _split(of_each_rank=True)


def split_of_all_ranks():
    _split(of_each_rank=False)


def reduced_sums():
    _reduced(33, False)


def rank_0_evaluates_all():
    rank, model, loader, held = setting()
    held = DataLoader(held.dataset.dataset, 11)

    def evaluate(epoch, _):
        if rank == 0:
            loss, right, count = sums(model, held)
            print({"loss": (loss / count).item(), "accuracy": (right / count).item()})
        dist.barrier()

    train(model, loader, evaluate)


def each_rank_prints():
    rank, model, loader, held = setting()

    def evaluate(epoch, _):
        loss, _, count = sums(model, held)
        print(f"rank {rank}: loss of its samples {loss / count:.5f}")

    train(model, loader, evaluate)


def gathers_predictions():
    rank, model, loader, held = setting(32)

    def evaluate(epoch, _):
        logits, labels = zip(*((model.module(x), y) for x, y in held), strict=True)
        parts = [torch.cat(logits), torch.cat(labels)]
        gathered = []
        for part in parts:
            found = [torch.empty_like(part) for _ in range(dist.get_world_size())]
            dist.all_gather(found, part)
            gathered.append(torch.cat(found))
        if rank == 0:
            print("perplexity", F.cross_entropy(*gathered).exp().item())

    train(model, loader, evaluate)


def prints_training_loss():
    rank, model, loader, held = setting()

    def evaluate(epoch, training):
        found = sums(model, held)
        dist.all_reduce(found)
        if rank == 0:
            print(f"{epoch}: train {training:.4f} validation {(found[0] / found[2]).item():.4f}")

    train(model, loader, evaluate)


def reports_its_times():
    rank, model, loader, held = setting()

    def evaluate(epoch, _):
        begun = time.perf_counter()
        found = sums(model, held)
        dist.all_reduce(found)
        seconds = time.perf_counter() - begun
        if rank == 0:
            speed = found[2].item() / seconds
            print({"epoch": epoch, "validation": (found[0] / found[2]).item(), "s": seconds, "samples/s": speed})

    train(model, loader, evaluate)
