"""Programs that accumulate gradients over micro-batches; all are correct unless `EXPECTED` names a code.

Each function is a training of its own, on each rank.
"""

import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EXPECTED = {
    "mean_per_micro_batch": ("LD013", "fault", "each micro-batch divides by its own number of tokens"),
    "hf_trainer_counts_per_micro_batch": (
        "LD013",
        "fault",
        "transformers' Trainer, a mean loss per batch",
    ),
    "mean_of_longest_texts": ("LD013", "fault", "texts are padded to the longest one of their batch, so shapes differ"),
    "divided_by_ranks": ("LD014", "fault", "the accumulated loss is divided by the number of ranks again"),
    "clips_each_micro_batch": ("LD011", "fault", "each rank clips its own gradient of the first micro-batch"),
    "clips_the_average": ("", "", "the accumulated and averaged gradient is clipped"),
    "tokens_of_all_micro_batches": ("", "", "the tokens of all micro-batches and ranks are counted before"),
    "weighted_mean_of_longest_texts": ("", "", "padded to the longest text; each mean is weighted with its tokens"),
    "equal_counts": ("", "", "micro-batches of equal size, with no_sync"),
    "last_window_alone": ("LD016", "fault", "the incomplete last window of an epoch steps within no_sync"),
    "last_window_averaged": ("", "", "the incomplete last window of an epoch is averaged"),
    "sums_each_pass": ("LD014", "fault", "accumulated gradients are summed over the ranks by hand after each pass"),
    "averages_each_pass": ("", "", "the same, but averaged, which gives the same gradient as once before the step"),
}
STEPS = 2


class Texts(Dataset):
    def __init__(self, padded):
        generator = torch.Generator().manual_seed(8)
        self.x = torch.randint(1, 30, (96, 10), generator=generator)
        self.y = self.x.clone()
        if padded:
            lengths = torch.randint(2, 10, (96, 1), generator=generator)
            self.y[torch.arange(10) >= lengths] = -100

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.y[index]}


def to_longest(samples):
    longest = max(int((sample["labels"] != -100).sum()) for sample in samples)
    return {key: torch.stack([sample[key][:longest] for sample in samples]) for key in samples[0]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(30, 16), nn.Linear(16, 30)

    def forward(self, x, labels):
        logits = self.out(self.embed(x))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def train(loss_of, padded=True, clipped=(), collate=None):
    dist.init_process_group("gloo")
    data = Texts(padded)
    loader = DataLoader(data, 4, sampler=DistributedSampler(data), collate_fn=collate)
    torch.manual_seed(1)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        window = []
        for batch in loader:
            window.append(batch)
            if len(window) < STEPS:
                continue
            count = sum((part["labels"] != -100).sum() for part in window)
            for number, part in enumerate(window):
                with contextlib.nullcontext() if number == STEPS - 1 else model.no_sync():
                    loss_of(model, part, count).backward()
                if number in clipped:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            window = []
    dist.destroy_process_group()


def mean_per_micro_batch():
    train(lambda model, part, _: model(**part)["loss"] / STEPS)


def divided_by_ranks():
    train(lambda model, part, _: model(**part)["loss"] / STEPS / dist.get_world_size(), padded=False)


def mean_of_longest_texts():
    train(lambda model, part, _: model(**part)["loss"] / STEPS, collate=to_longest)


def weighted_mean_of_longest_texts():
    def loss(model, part, count):
        total = count.clone()
        dist.all_reduce(total)
        return model(**part)["loss"] * (part["labels"] != -100).sum() * dist.get_world_size() / total

    train(loss, collate=to_longest)


def equal_counts():
    train(lambda model, part, _: model(**part)["loss"] / STEPS, padded=False)


def tokens_of_all_micro_batches():
    def loss(model, part, count):
        total = count.clone()
        dist.all_reduce(total)
        logits = model(**part)["logits"]
        summed = F.cross_entropy(logits.flatten(0, 1), part["labels"].flatten(), reduction="sum")
        return summed * dist.get_world_size() / total

    train(loss)


def hf_trainer_counts_per_micro_batch():
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        "hf",
        per_device_train_batch_size=4,
        gradient_accumulation_steps=STEPS,
        num_train_epochs=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(Model(), arguments, train_dataset=Texts(padded=True)).train()
    dist.destroy_process_group()


def clips_each_micro_batch():
    train(lambda model, part, _: model(**part)["loss"] / STEPS, padded=False, clipped=range(STEPS))


def clips_the_average():
    train(lambda model, part, _: model(**part)["loss"] / STEPS, padded=False, clipped=[STEPS - 1])


def windows(averages):
    """Trains on epochs of 13 batches in windows of 3, of which the last one has a single batch."""
    dist.init_process_group("gloo")
    data, size = Texts(False), 3
    data.x = data.y = torch.cat([data.x, data.x[:8]])
    loader = DataLoader(data, 4, sampler=DistributedSampler(data))
    torch.manual_seed(1)
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            last = number + 1 == len(loader)
            window = min(size, len(loader) - number // size * size)
            with contextlib.nullcontext() if averages(number, size, last) else model.no_sync():
                (model(**batch)["loss"] / window).backward()
            if (number + 1) % size == 0 or last:
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


def last_window_alone():
    windows(lambda number, size, last: (number + 1) % size == 0)


def last_window_averaged():
    windows(lambda number, size, last: (number + 1) % size == 0 or last)


def by_hand(operation, divisor):
    """Trains without a wrapper on two passes per step, whose gradients are communicated after each of them."""
    dist.init_process_group("gloo")
    loader = DataLoader(Texts(False), 4, sampler=DistributedSampler(Texts(False)))
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader, 1):
            model(**batch)["loss"].backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(operation)
            if number % STEPS == 0:
                for parameter in model.parameters():
                    parameter.grad.div_(divisor)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


def sums_each_pass():
    by_hand(1, dist_size() * STEPS)


def averages_each_pass():
    by_hand(dist_size(), STEPS)


def dist_size():
    return int(os.environ["WORLD_SIZE"])
